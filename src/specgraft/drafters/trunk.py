"""The block trunk of DFlash, DFlash2 and DSpark: slots over injected target states (algorithms.md 2.4 and 2.5).

Legend: B rows, T context tokens, K taps, D hidden size, N blocks, S slots a block, Hk key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import SLIDING, DrafterConfig
from specgraft.drafters.drafter import Texts
from specgraft.drafters.layers import Layer, RMSNorm, initialise, rope_tables
from specgraft.drafters.shared import Shared
from specgraft.ops.block_attention.spans import Spans

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values [B, T, Hk, d]


class Trunk:
    """fc, hidden_norm, layers and norm, and how a block runs through them.

    A block has G slots that propose, behind `idle` ones that do not (DFlash: 1). Not a module itself: the drafter registers
    the four parts under the names that engines load.
    """

    def __init__(self, config: DrafterConfig, layer: Callable[[DrafterConfig], nn.Module] = Layer, idle: int = 0) -> None:
        self.config = c = config
        self.idle, self.slots = idle, idle + c.draft_tokens
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.eps)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden_size, c.eps)
        initialise(self.fc, self.layers)

    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> Pairs:
        """Keys and values that blocks read, one pair a layer, from taps [B,T,K,D] at positions [B,T]."""
        states = self.hidden_norm(self.fc(taps.flatten(-2)))
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.keys_values(states, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def run(self, x: torch.Tensor, positions: torch.Tensor, context: Pairs, first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Block inputs x [B,N,S,D] at positions [B,N,S] -> normed states [B,N,S,D]; blocks read context [first, end) [B,N]."""
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        full = Spans(first, end, self.config.block_causal)
        sliding = replace(full, window=self.config.sliding_window)
        for layer, kind, pair in zip(self.layers, self.config.layer_types, context, strict=True):
            x = layer(x, pair, sliding if kind == SLIDING else full, cos, sin)
        return self.norm(x)

    def encode(self, texts: Texts) -> Pairs:
        return self.context(texts.taps, texts.positions)

    def states(self, shared: Shared, texts: Texts, context: Pairs, anchors: torch.Tensor) -> torch.Tensor:
        """Normed states [B,N,G,D] of the proposing slots of blocks [x_a, mask, ..] at anchors [B,N] of texts."""
        x = open_block(shared, texts.input_ids.gather(1, anchors), self.slots)
        first = texts.starts.gather(1, anchors)
        positions = (anchors - first)[..., None] + torch.arange(self.slots, device=anchors.device)
        return self.run(x, positions, context, first, anchors)[:, :, self.idle :]

    def advance(self, cache: DraftCache, taps: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> None:
        """Context keys and values of new positions: only these are computed, once."""
        positions = cache.places(rows, taps.shape[1])
        cache.write(self.context(taps, positions), rows, positions)
        cache.lengths[rows] += counts

    def draft_states(self, shared: Shared, cache: DraftCache, rows: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        """Normed states [b,G,D] of the proposing slots of one block behind the context of each cache row."""
        context = cache.view(rows)
        end = cache.lengths[rows][:, None]
        positions = end[..., None] + torch.arange(self.slots, device=end.device)
        x = open_block(shared, anchor_ids[:, None], self.slots)
        return self.run(x, positions, context, torch.zeros_like(end), end)[:, 0, self.idle :]


def open_block(shared: Shared, anchor_ids: torch.Tensor, slots: int) -> torch.Tensor:
    """Block inputs [B,N,slots,D]: the anchor's embedding, then the mask token's; anchor_ids [B,N]."""
    mask_state = shared.embed(torch.tensor(shared.mask_token_id, device=anchor_ids.device))
    place = torch.arange(slots, device=anchor_ids.device)[:, None]
    return torch.where(place == 0, shared.embed(anchor_ids)[:, :, None, :], mask_state)
