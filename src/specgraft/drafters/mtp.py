"""MTP: independent heads on a causal trunk over the committed text, the baseline drafter (algorithms.md 2.6).

Sources: Medusa 2401.10774 (heads), DeepSeek-V3 2412.19437 (what the trunk reads); zero heads as in Medusa's residual form.
At position t the trunk reads the target's states up to t-1 and the token at t. Head j on its state at anchor a proposes
the token at a+j; drafts do not depend on one another.
Legend: B rows, T tokens, K taps, N anchors, G draft tokens, D hidden size, b rows of a call, W new positions,
Hk key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import SLIDING, DrafterConfig
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.layers import Layer, RMSNorm, initialise, rope_tables
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import Proposal, walk
from specgraft.ops.block_attention.spans import Spans
from specgraft.ops.sampling import Law

KeyValue = tuple[torch.Tensor, torch.Tensor]  # keys, values [B, T, Hk, d]
STATE = "state"  # name of u at each row's anchor, [rows, D], in the cache


class MTP(Drafter):
    """`fc`, `hidden_norm`, `layers` and `norm` are named as in the block drafters; W_j is the j-th of the G parts of `heads`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.eps)
        self.state_norm = RMSNorm(c.hidden_size, c.eps)
        self.token_norm = RMSNorm(c.hidden_size, c.eps)
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden_size, c.eps)
        self.heads = nn.Linear(c.hidden_size, c.draft_tokens * c.hidden_size, bias=False)
        initialise(self.fc, self.input_proj, self.layers)
        nn.init.zeros_(self.heads.weight)  # all heads start as the trunk's own state
        self.markov_head = self.selector = self.confidence_head = None

    def encode(self, shared: Shared, texts: Texts) -> torch.Tensor:
        """u [B,T,D] of every position."""
        before = F.pad(self.context(texts.taps)[:, :-1], (0, 0, 1, 0))
        before = before.masked_fill((texts.positions == 0)[..., None], 0)
        x = self.inputs(before, shared.embed(texts.input_ids))
        place = torch.arange(x.shape[1], device=x.device).expand_as(texts.starts)
        # causal attention: every token is a block of one slot
        return self.run(x[:, :, None], texts.positions[..., None], texts.starts, place, lambda index, new: new)[:, :, 0]

    def states(self, shared: Shared, texts: Texts, encoded: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return self.apply_heads(encoded.gather(1, anchors[..., None].expand(-1, -1, encoded.shape[2])))

    def advance(
        self, shared: Shared, cache: DraftCache, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
    ) -> None:
        fresh = cache.lengths[rows] == 0
        for some, skip in ((fresh, 0), (~fresh, 1)):  # the trunk has seen the old anchor of a row, where there is one
            if some.any():
                self.extend(shared, cache, taps[some], tokens[some], counts[some], rows[some], skip)
        cache.lengths[rows] += counts

    def draft(
        self,
        shared: Shared,
        cache: DraftCache,
        rows: torch.Tensor,
        anchor_ids: torch.Tensor,
        laws: Sequence[Law],
        uniforms: torch.Tensor | None = None,
    ) -> Proposal:
        return walk(self, shared, self.apply_heads(cache.extra[STATE][rows]), anchor_ids, laws, uniforms)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """H_ctx [B,T,D] of taps [B,T,K,D]."""
        return self.hidden_norm(self.fc(taps.flatten(-2)))

    def inputs(self, before: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """z [B,T,D] from the target's state before each position (zero at the first) and the token's embedding."""
        z = self.input_proj(torch.cat([self.state_norm(before), self.token_norm(embedded)], -1))
        return z if z.dtype == torch.float64 else z.float()  # the residual stream

    def apply_heads(self, trunk: torch.Tensor) -> torch.Tensor:
        """h [..,G,D] of u [..,D]."""
        return trunk[..., None, :] + F.silu(self.heads(trunk)).unflatten(-1, (self.config.draft_tokens, -1))

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
        keep: Callable[[int, KeyValue], KeyValue],
    ) -> torch.Tensor:
        """z [B,N,S,D] at positions [B,N,S] -> u [B,N,S,D]; a slot reads itself, those before it in its block, and the
        places [first, end) [B,N].

        `keep(i, new)` takes keys and values [B,N*S,Hk,d] of layer i, and gives those of all places.
        """
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        full = Spans(first, end, causal=True)
        sliding = replace(full, window=self.config.sliding_window)
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=True)):
            key, value = layer.self_attn.keys_values(layer.input_layernorm(x), cos, sin)  # type: ignore[union-attr, operator]
            context = keep(index, (key.flatten(1, 2), value.flatten(1, 2)))
            x = layer(x, context, sliding if kind == SLIDING else full, cos, sin)
        return self.norm(x)

    def extend(
        self,
        shared: Shared,
        cache: DraftCache,
        taps: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        rows: torch.Tensor,
        skip: int,
    ) -> None:
        """Runs the trunk over tokens [b,W+1] without the first `skip`, and keeps the state at each new anchor."""
        places = cache.places(rows, tokens.shape[1])[:, skip:]
        before = F.pad(self.context(taps), (0, 0, 1, 0))[:, skip:]
        x = self.inputs(before, shared.embed(tokens[:, skip:]))
        # what a round commits is one block; a prompt is not, as blocks know no window
        short = places.shape[1] <= self.config.draft_tokens + 1
        blocks = places[:, None] if short else places[..., None]
        reach = int(places.max())
        state = self.run(
            x.view(*blocks.shape, -1),
            blocks,
            torch.zeros_like(blocks[..., 0]),
            blocks[..., 0],
            lambda index, new: grow(cache, index, new, rows, places, reach),
        ).flatten(1, 2)
        kept = cache.extra.setdefault(STATE, state.new_zeros(cache.rows, state.shape[2]))
        kept[rows] = state[torch.arange(len(rows), device=state.device), counts - skip]


def grow(cache: DraftCache, index: int, new: KeyValue, rows: torch.Tensor, places: torch.Tensor, reach: int) -> KeyValue:
    """Puts keys and values [b,W,Hk,d] of one layer at places [b,W]; gives those of these rows at places below `reach`.

    A layer's keys depend on the layer below, so that layers are written one by one; place `reach` is read by nobody.
    """
    if index == len(cache.layers):
        shape = (cache.rows, cache.slots, *new[0].shape[2:])
        cache.layers.append((new[0].new_zeros(shape), new[1].new_zeros(shape)))
    keys, values = cache.layers[index]
    keys[rows[:, None], places], values[rows[:, None], places] = new
    if len(rows) == cache.rows:  # rows are distinct and sorted: all of them
        return keys[:, :reach], values[:, :reach]
    return keys[rows, :reach], values[rows, :reach]
