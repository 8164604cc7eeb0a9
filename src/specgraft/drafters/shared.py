"""What a drafter borrows from its target: frozen, never trained, never saved with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shared:
    """Embedding, head and final norm of the target. D hidden size, V vocabulary."""

    embedding: torch.Tensor  # [V, D]
    head: torch.Tensor  # [V, D]
    final_norm: nn.Module  # the target's own class
    mask_token_id: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [.., D] of ids [..], in float32 (float64 weights: float64)."""
        rows = self.embedding[ids]
        return rows if rows.dtype == torch.float64 else rows.float()
