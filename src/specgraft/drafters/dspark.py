"""DSpark: a parallel block over injected target states, a low-rank Markov correction, a confidence head.

Sources: DSpark paper eqs. 4 to 8, DeepSpec; layout and alignment as algorithms.md 2.2 to 2.10.
A block is [x_a, mask x (G-1)]: slot j-1, at position a+j-1, proposes the token at a+j.
Legend: B rows, N blocks, G draft tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.confidence import ConfidenceHead
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.markov import MarkovHead
from specgraft.drafters.shared import Shared
from specgraft.drafters.trunk import Pairs, Trunk
from specgraft.drafters.walk import Proposal, walk
from specgraft.ops.sampling import Law


class DSpark(Drafter):
    """Parameter names are those of contracts/sglang.md 2.3. `markov_rank` 0: no sequential head (DeepSpec's "DFlash")."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.trunk = Trunk(c)
        self.fc, self.hidden_norm, self.layers, self.norm = self.trunk.fc, self.trunk.hidden_norm, self.trunk.layers, self.trunk.norm
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.confidence_head = ConfidenceHead(c) if c.confidence else None
        self.selector = None

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
        return walk(self, shared, hidden, anchor_ids, laws, uniforms, cache.bias)
