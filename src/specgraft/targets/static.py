"""The cache of a `Lean` pass: keys and values in place, rows at lengths of their own, and where a pass's tokens go.

Legend: B rows of the cache, b rows of a pass, N tokens of a pass, W tokens a row of a run, S slots, H query and Hk key/value heads,
g = H // Hk, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specgraft.targets.masked import biases

WASTE = 256  # places read for nothing (padding) that cost about as much as one more call


@dataclass(frozen=True)
class Run:
    """Tokens of consecutive rows of a pass, W each, that one call of attention serves."""

    tokens: slice  # of the pass's N
    rows: slice | torch.Tensor  # of the cache, b in all
    count: int  # b
    width: int  # W
    reach: int  # places that its longest row holds with its new tokens
    bias: torch.Tensor | None  # [b, 1, g*W, reach]; None: every key is seen, or the run is `causal`
    causal: bool  # rows from their start: key j is seen by token i >= j

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query [b*W, H, d], keys and values [B, Hk, S, d] of one layer -> [b*W, H*d]."""
        k, v = keys[self.rows, :, : self.reach], values[self.rows, :, : self.reach]
        heads = k.shape[1]
        if self.causal:
            q = query.view(self.count, self.width, -1, query.shape[2]).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(len(query), -1)
        group = query.shape[1] // heads
        lines = query.view(self.count, self.width, heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(lines, k, v, attn_mask=self.bias, scale=scale)  # g query heads as rows of their key head
        return out.unflatten(2, (group, self.width)).permute(0, 3, 1, 2, 4).reshape(len(query), -1)


@dataclass(frozen=True)
class Places:
    """Where the N tokens of a pass stand. Filled by `StaticCache.begin` and `pack`."""

    positions: torch.Tensor  # [N]
    flat: torch.Tensor | None  # [N*Hk] lines of the flattened cache [B*Hk*S, d]; None where `only` holds
    only: tuple[int, int] | None  # row and first place, where one row alone has tokens
    runs: Sequence[Run]
    spread: torch.Tensor | None = None  # [b*W] tokens of a ragged pass laid out as one run, the last one of a row again behind it
    gather: torch.Tensor | None = None  # [N] back

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """[N, H*d] of query [N, H, d] over keys and values [B, Hk, S, d] that hold the new tokens already."""
        if self.spread is not None:
            return self.runs[0].attend(query[self.spread], keys, values, scale)[self.gather]
        if len(self.runs) == 1:
            return self.runs[0].attend(query, keys, values, scale)
        return torch.cat([run.attend(query[run.tokens], keys, values, scale) for run in self.runs])

    def write(self, store: torch.Tensor, new: torch.Tensor) -> None:
        """Puts new [N, Hk, d] into store [B, Hk, S, d]."""
        if self.only is not None:
            row, first = self.only
            store[row, :, first : first + len(new)] = new.transpose(0, 1)
        else:
            assert self.flat is not None
            store.view(-1, store.shape[3]).index_copy_(0, self.flat, new.reshape(-1, new.shape[2]))


class StaticCache:
    """As `SlotCache`, for targets that keep keys and values only. `lengths` [B] are moved on by the caller."""

    def __init__(self, rows: int, slots: int, layers: int, heads: tuple[int, int], size: int, like: torch.Tensor) -> None:
        self.rows, self.slots, self.device, self.heads = rows, slots, like.device, heads  # (H, Hk)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        shape = (rows, heads[1], slots, size)
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]
        self.every = torch.arange(rows, device=like.device)

    def begin(self, width: int, rows: torch.Tensor | None, reach: int | None = None) -> Places:
        """`width` new tokens behind each chosen row, all by default. `reach` bounds the places that a row will hold: with it no device
        is waited for. Raises ValueError when a row is full."""
        index = self.every if rows is None else rows
        count = len(index)
        before = self.lengths[index]
        positions = before[:, None] + torch.arange(width, device=self.device)
        if reach is not None:
            self._fits(reach)
            run = self._run(0, count, width, reach, slice(0, count) if rows is None else index, positions, False)
            return Places(positions.flatten(), self._flat(index.repeat_interleave(width, output_size=count * width), positions), None, [run])
        chosen, held = index.tolist(), before.tolist()
        self._fits(max(held) + width)
        runs = []
        for first, end in divided(chosen, held, width):
            most, fresh = max(held[first:end]), not any(held[first:end]) and width > 1
            seen = width == 1 and min(held[first:end]) == most
            where = slice(chosen[first], chosen[first] + end - first)
            runs.append(self._run(first, end, width, most + width, where, None if fresh or seen else positions[first:end], fresh))
        if count == 1:
            return Places(positions[0], None, (chosen[0], held[0]), runs)
        return Places(positions.flatten(), self._flat(index.repeat_interleave(width), positions), None, runs)

    def pack(self, counts: torch.Tensor, rows: torch.Tensor) -> Places:
        """counts[b] >= 1 new tokens of row rows[b], ascending, laid end to end. Raises ValueError when a row is full."""
        before = self.lengths[rows]
        wide, chosen, held = counts.tolist(), rows.tolist(), before.tolist()
        self._fits(max(length + count for length, count in zip(held, wide, strict=True)))
        owner = torch.repeat_interleave(torch.arange(len(rows), device=self.device), counts)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(owner), device=self.device) - starts[owner]
        positions = before[owner] + place
        flat = self._flat(rows[owner], positions)
        if not any(held):  # prompts: a call each, so that none is read as long as the longest
            ends = [sum(wide[: number + 1]) for number in range(len(wide))]
            runs = [
                Run(slice(end - count, end), slice(row, row + 1), 1, count, count, None, True)
                for row, count, end in zip(chosen, wide, ends, strict=True)
            ]
            return Places(positions, flat, None, runs)
        width = max(wide)
        slot = torch.arange(width, device=self.device)
        spread = (starts[:, None] + torch.minimum(slot, counts[:, None] - 1)).flatten()
        reach = max(held) + width  # a place that no real token has is read by none
        reach = min(reach, self.slots)
        every = len(chosen) == self.rows
        run = self._run(0, len(chosen), width, reach, slice(0, self.rows) if every else rows, before[:, None] + slot, False)
        return Places(positions, flat, None, [run], spread, owner * width + place)

    def _run(
        self, first: int, end: int, width: int, reach: int, where: slice | torch.Tensor, positions: torch.Tensor | None, causal: bool
    ) -> Run:
        bias = None
        if positions is not None:
            hidden = torch.arange(reach, device=self.device) > positions[..., None]
            bias = biases(hidden, self.heads[0] // self.heads[1], self.layers[0][0].dtype)
        return Run(slice(first * width, end * width), where, end - first, width, reach, bias, causal)

    def _flat(self, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Lines [N*Hk] of cache rows owner [N] at positions [N] in any shape."""
        head = torch.arange(self.heads[1], device=self.device)
        return ((owner[:, None] * self.heads[1] + head) * self.slots + positions.reshape(-1, 1)).flatten()

    def _fits(self, reach: int) -> None:
        if reach > self.slots:
            raise ValueError(f"a sequence needs {reach} cache places and the cache has {self.slots}")


def divided(rows: Sequence[int], lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """[first, end) of runs of consecutive cache rows of like length: less padding is read than one more call costs."""
    runs, first, most, least = [], 0, 0, 0
    for place, length in enumerate(lengths):
        high, low = max(most, length), least + length
        apart = place > first and rows[place] != rows[place - 1] + 1
        if place > first and (apart or (high * (place + 1 - first) - low) * width > WASTE or (width > 1 and (length == 0) != (most == 0))):
            runs.append((first, place))
            first, high, low = place, length, length
        most, least = high, low
    return [*runs, (first, len(lengths))]
