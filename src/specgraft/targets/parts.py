"""What lies before the tokens of a forward pass: every pass of the target is made of parts.

Layer code is written once, for [R, T, ..] tokens of one part. A part tells it what came before (attention keys, the last few
values of a convolution, a recurrent state) and keeps what later parts will ask for. `StemPart` is one text from its start,
`NodesPart` the branches of a proposal tree behind a stem, `rows.RowsPart` the rows of a decode loop.
Legend: R rows of a part, T tokens a row, H query heads, Hk key/value heads, d head size, S stem tokens, N branches, W tokens
a branch, B rows of a pass, L tokens of a pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from specgraft.ops.gated_delta.chunked import Record
from specgraft.ops.sparse_choice.vectorised import choose_branches, choose_rows, own_groups
from specgraft.ops.tree_attention.two_part import tree_attention
from specgraft.records import ProposalTree
from specgraft.targets.masked import attend_masked, causal_mask

CHUNKS = 16, 64  # least and most tokens between the states that a pass keeps

Key = tuple[int, str]  # layer id, and what of it


class Heads(NamedTuple):
    """What an attention layer asks with. Filled by `targets.attention`."""

    query: torch.Tensor  # [R, T, H, d]
    key: torch.Tensor  # [R, T, Hk, d]
    value: torch.Tensor  # [R, T, Hk, dv]
    scale: float
    window: int  # 0: all tokens before
    sinks: torch.Tensor | None  # [H] a logit that takes probability and brings no value (gpt_oss)


class Chosen(NamedTuple):
    """Tokens that a sparse layer lets its queries read. Filled by `targets.sparse`."""

    before: torch.Tensor  # [R, T, tokens before and, for StemPart and RowsPart, of this part] bool
    own: torch.Tensor | None  # [N, W, W] bool, for NodesPart


class Part(ABC):
    """Tokens [R, T] of a pass."""

    chosen: dict[int, Chosen]  # by layer id; filled by a sparse layer just before its attention runs

    @abstractmethod
    def before(self, key: Key, values: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        """The `width` values before the first token of each row, [R, width, ..], `fill` where there is none.

        values [R, T, ..] are this part's own; they are kept for what comes behind.
        """

    @abstractmethod
    def state(self, key: Key) -> torch.Tensor | None:
        """Recurrent state [R, H, dk, dv] before the first token of each row; None for zeros."""

    @abstractmethod
    def keep(self, key: Key, record: Record) -> None:
        """Takes the record of this part's tokens."""

    @abstractmethod
    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        """[R, T, H, dv]: attention over what came before and the part's own tokens, causal."""

    @abstractmethod
    def choose(self, layer: int, query: torch.Tensor, raw: torch.Tensor, index: SparseIndex) -> Chosen:
        """What queries [R, T, H, d] of a sparse layer may read; raw [R, T, d] are the indexer's keys of this part's tokens."""


@dataclass(frozen=True)
class SparseIndex:
    """The choice of a sparse layer (QSA): the best `top` groups of `ratio` tokens. Filled by `targets.sparse`."""

    ratio: int
    top: int
    pool: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # raw [.., ratio, d], first positions [..] -> group keys [.., d]


@dataclass(frozen=True)
class Work:
    """One forward pass: its tokens as the model sees them, and as parts."""

    ids: torch.Tensor  # [B, L]
    positions: torch.Tensor  # [B, L] semantic ones
    parts: Sequence[Part]
    split: Callable[[torch.Tensor], list[torch.Tensor]]  # [B, L, ..] -> [R, T, ..] of each part
    merge: Callable[[list[torch.Tensor]], torch.Tensor]  # back

    def run(self, layer: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
        """layer(part, [R, T, ..], ..) -> [R, T, ..] over all parts of values [B, L, ..]."""
        pieces = zip(self.parts, *(self.split(value) for value in values), strict=True)
        return self.merge([layer(*piece) for piece in pieces])


@dataclass
class StemPart(Part):
    """One text from its first token, R = 1; what it keeps is read by the branches behind it."""

    length: int
    memory: dict[Key, Any] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)

    def before(self, key: Key, values: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        self.memory[key] = values[0]
        return values.new_full((1, width, *values.shape[2:]), fill)

    def state(self, key: Key) -> torch.Tensor | None:
        return None

    def keep(self, key: Key, record: Record) -> None:
        self.memory[key] = record

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        self.memory[layer, "kv"] = heads.key[0], heads.value[0]
        if layer in self.chosen:
            return attend_masked(heads, self.chosen.pop(layer).before)
        if heads.window or heads.sinks is not None:
            return attend_masked(heads, causal_mask(self.length, heads.window, heads.query.device)[None])
        query, key, value = (x.transpose(1, 2) for x in heads[:3])
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=heads.scale, enable_gqa=True).transpose(1, 2)

    def choose(self, layer: int, query: torch.Tensor, raw: torch.Tensor, index: SparseIndex) -> Chosen:
        whole = self.length // index.ratio * index.ratio
        groups = raw[:, :whole].unflatten(1, (-1, index.ratio))
        first = torch.arange(0, whole, index.ratio, device=raw.device)[None]
        keys = index.pool(groups, first)
        self.memory[layer, "groups"], self.memory[layer, "raw"] = keys[0], raw[0]
        lengths = torch.arange(1, self.length + 1, device=raw.device)[None]
        return Chosen(choose_rows(query, keys, lengths, index.ratio, index.top, self.length), None)


@dataclass
class NodesPart(Part):
    """The branches of a tree, R = N and T = W, behind what `stem` kept."""

    tree: ProposalTree
    stem: StemPart
    chosen: dict[int, Chosen] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # [N, W, S] by window

    def before(self, key: Key, values: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        past = self.stem.memory[key]
        index = self.tree.anchors[:, None] + 1 - width + torch.arange(width, device=past.device)
        found = past[index.clamp(min=0)]
        empty = (index < 0).view(*index.shape, *[1] * (found.dim() - 2))
        return found.masked_fill(empty, fill)

    def state(self, key: Key) -> torch.Tensor | None:
        record: Record = self.stem.memory[key]
        return record.after(torch.zeros_like(self.tree.anchors), self.tree.anchors + 1)

    def keep(self, key: Key, record: Record) -> None:
        return None  # nothing comes behind a branch

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        count, width = self.tree.branches.shape
        chosen = self.chosen.pop(layer, None)
        own = torch.ones(width, width, dtype=torch.bool, device=heads.query.device).tril()
        if heads.window and width > heads.window:
            own = own.triu(1 - heads.window)
        key, value = self.stem.memory[layer, "kv"]
        return tree_attention(
            *(heads.query, key, value, heads.key, heads.value),
            self._visible(heads.window) if chosen is None else chosen.before,
            own.expand(count, width, width) if chosen is None or chosen.own is None else chosen.own,
            heads.scale,
            heads.sinks,
        )

    def _visible(self, window: int) -> torch.Tensor:
        """[N, W, S]: stem tokens that every node sees."""
        if window not in self.masks:
            token = torch.arange(self.tree.stem, device=self.tree.anchors.device)
            seen = (token <= self.tree.anchors[:, None])[:, None].expand(*self.tree.branches.shape, -1)
            self.masks[window] = seen & (self.tree.positions[..., None] - token < window) if window else seen
        return self.masks[window]

    def choose(self, layer: int, query: torch.Tensor, raw: torch.Tensor, index: SparseIndex) -> Chosen:
        groups, first = own_groups(self.stem.memory[layer, "raw"], raw, self.tree.anchors, index.ratio)
        keys, anchors = index.pool(groups, first), self.tree.anchors
        return Chosen(
            *choose_branches(query, self.stem.memory[layer, "groups"], keys, anchors, index.ratio, index.top, self.tree.stem)
        )


def tree_work(ids: torch.Tensor | None, tree: ProposalTree | None, stem: StemPart) -> Work:
    """The pass over stem tokens `ids` [S] (None: done before), over the nodes of `tree` (None: only the stem), or over both."""
    rows, positions, parts = [], [], list[Part]()
    if ids is not None:
        rows.append(ids)
        positions.append(torch.arange(len(ids), device=ids.device))
        parts.append(stem)
    if tree is not None:
        rows.append(tree.branches.flatten())
        positions.append(tree.positions.flatten())
        parts.append(NodesPart(tree, stem))
    first = 0 if ids is None else len(ids)
    shape = None if tree is None else tree.branches.shape

    def split(x: torch.Tensor) -> list[torch.Tensor]:
        return ([x[:, :first]] if first else []) + ([x[0, first:].unflatten(0, shape)] if shape is not None else [])

    def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([piece.flatten(0, 1) for piece in pieces])[None]

    return Work(torch.cat(rows)[None], torch.cat(positions)[None], parts, split, merge)
