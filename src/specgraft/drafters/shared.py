"""What a drafter borrows from its target: frozen, never trained, never saved with it."""

from __future__ import annotations

from dataclasses import dataclass
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

    @classmethod
    def of(cls, target: Lender, mask_token_id: int) -> Shared:
        """The target's own tensors, without gradient."""
        return cls(target.embedding.weight.detach(), target.head.weight.detach(), target.final_norm, mask_token_id)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [.., D] of ids [..], in float32 (float64 weights: float64)."""
        rows = self.embedding[ids]
        return rows if rows.dtype == torch.float64 else rows.float()
