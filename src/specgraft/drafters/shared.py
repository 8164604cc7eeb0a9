"""What a drafter borrows from its target: frozen, never trained, never saved with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn


class Lender(Protocol):
    """As much of a target as a drafter borrows from (`targets.model.Target`)."""

    embedding: nn.Embedding
    head: nn.Linear
    final_norm: nn.Module



@dataclass(frozen=True)
class Shared:
    """Embedding, head and final norm of the target. D hidden size, V vocabulary."""

    embedding: torch.Tensor  # [V, D]
    head: torch.Tensor  # [V, D]
    final_norm: nn.Module  # the target's own class
    mask_token_id: int
    converted: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)  # of `head_as`

    @classmethod
    def of(cls, target: Lender, mask_token_id: int) -> Shared:
        """The target's own tensors, without gradient."""
        return cls(target.embedding.weight.detach(), target.head.weight.detach(), target.final_norm, mask_token_id)

    def head_as(self, kind: torch.dtype) -> torch.Tensor:
        """The head [V,D] for products in `kind`: a half-precision copy is made once, others are the head itself."""
        if self.head.dtype == kind or kind not in (torch.bfloat16, torch.float16):
            return self.head
        if kind not in self.converted:
            self.converted[kind] = self.head.to(kind)
        return self.converted[kind]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [.., D] of ids [..], in float32 (float64 weights: float64)."""
        rows = self.embedding[ids]
        return rows if rows.dtype == torch.float64 else rows.float()
