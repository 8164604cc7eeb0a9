"""Choosing one of the top candidates of a slot by the token before it (DFlash2; algorithms.md 2.8).

Z(y, v) = U(v) + <A[y] * H h, B[v]> for the k candidates v with the largest unary logits U; every other token has chance 0.
Legend: B rows, D hidden size, V vocabulary, r rank, k candidates.
"""

from __future__ import annotations

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig


class Selector(nn.Module):
    """Names and shapes are those of contracts/sglang.md 2.3. Starts as no selection: the successor codebook is zero (NeMo).

    Raises ValueError for more candidates than tokens, or no rank.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        vocab, rank, self.top_k = config.vocab_size, config.selector_rank, config.selector_top_k
        if rank < 1:
            raise ValueError(f"drafters.selector_rank={rank}: must be 1 or more")
        if not 1 <= self.top_k <= vocab:
            raise ValueError(f"drafters.selector_top_k={self.top_k}: must lie in 1 to {vocab}, the vocabulary")
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))  # A
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))  # B
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)  # H
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def gate(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """A[y] * H h [..,r], float32 at least, of states hidden [..,D] behind the tokens previous [..]."""
        before, state = self.predecessor_codebook[previous], self.hidden_projection(hidden)
        wide = torch.promote_types(torch.promote_types(before.dtype, state.dtype), torch.float32)
        return before.to(wide) * state.to(wide)

    def logits(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Z [B,V] in float32 (float64), -inf outside the candidates, from U = base [B,V], h [B,D] and y = previous [B]."""
        unary, candidates = base.to(torch.promote_types(base.dtype, torch.float32)).topk(self.top_k, -1)
        gate = self.gate(hidden, previous)
        pair = torch.einsum("br,bkr->bk", gate, self.successor_codebook[candidates].to(gate.dtype))
        scores = unary + pair.to(unary.dtype)
        return unary.new_full(base.shape, float("-inf")).scatter_(-1, candidates, scores)
