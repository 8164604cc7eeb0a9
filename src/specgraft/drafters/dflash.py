"""DFlash: a parallel block over injected target states, every draft on its own.

Sources: arXiv 2602.06036, z-lab dflash; layout and alignment as algorithms.md 2.2 to 2.7.
A block is [x_a, mask x G]: slot j, at position a+j, proposes the token at a+j; slot 0 proposes nothing.
Legend: B rows, N blocks, G draft tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared
from specgraft.drafters.trunk import Pairs, Trunk
from specgraft.drafters.walk import Proposal, walk
from specgraft.ops.sampling import Law


class DFlash(Drafter):
    """Parameter names are those of contracts/sglang.md 2.3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, idle=1)
        self.fc, self.hidden_norm, self.layers, self.norm = self.trunk.fc, self.trunk.hidden_norm, self.trunk.layers, self.trunk.norm
        self.markov_head = self.selector = self.confidence_head = None

    def encode(self, shared: Shared, texts: Texts) -> Pairs:
        return self.trunk.encode(texts)

    def states(self, shared: Shared, texts: Texts, encoded: Pairs, anchors: torch.Tensor) -> torch.Tensor:
        return self.trunk.states(shared, texts, encoded, anchors)

    def advance(
        self, shared: Shared, cache: DraftCache, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
    ) -> None:
        self.trunk.advance(cache, taps, counts, rows)

    def draft(
        self,
        shared: Shared,
        cache: DraftCache,
        rows: torch.Tensor,
        anchor_ids: torch.Tensor,
        laws: Sequence[Law],
        uniforms: torch.Tensor | None = None,
    ) -> Proposal:
        hidden = self.trunk.draft_states(shared, cache, rows, anchor_ids)
        return walk(self, shared, hidden, anchor_ids, laws, uniforms)
