"""The confidence head (DSpark eqs. 7 and 8; algorithms.md 2.10)."""

from __future__ import annotations

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """Logit that draft j is accepted, given that the drafts before it were; never reads draft j itself. float32."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov and config.markov_rank > 0
        self.detach = config.confidence_detach
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)
        nn.init.normal_(self.proj.weight, std=0.02)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Logits [..] from h [..,D] and the Markov embedding e [..,r] of the token before the draft."""
        if self.with_markov:
            assert embedded is not None
            hidden = torch.cat([hidden, embedded.to(hidden.dtype)], -1)
        if self.detach:
            hidden = hidden.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            wide = hidden if self.proj.weight.dtype == torch.float64 else hidden.float()
            return self.proj(wide)[..., 0]
