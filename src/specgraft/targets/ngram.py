"""The n-gram embeddings of qwen4_exp (per-layer embedding): which n-gram a token ends, and a short dilated convolution.

Both reach back over the last few tokens, so a branch or a decode row needs the ids and the convolution's inputs before it.
Source: transformers' qwen4_exp; targets.md 2.2. Legend: R rows, T tokens, E = streams * D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from specgraft.targets.parts import Part, Work


class NGram:
    """Runs one PLE module of the model over the parts of a pass."""

    def __init__(self, module: Any, layer: int, base: Any) -> None:
        self.module, self.layer = module, layer

    def __call__(self, work: Work, hidden: torch.Tensor, ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return work.run(self.part, hidden, ids)

    def part(self, part: Part, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """hidden [R,T,E] and token ids [R,T] -> [R,T,E]."""
        m, grams = self.module, self.module.ple_embedding
        width = grams.context_len
        before = part.before((self.layer, "ids"), ids, width, fill=grams.eos_token_id)
        embedded = grams(torch.cat([before, ids], 1), None)[:, width:]
        key = m.norm_key(m.key_proj(embedded)).unflatten(-1, (m.hc_count, m.hidden_size))
        query = m.norm_query(hidden).unflatten(-1, (m.hc_count, m.hidden_size))
        gate = (key * query).sum(-1, keepdim=True) / m.hidden_size**0.5
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        value = (gate.sigmoid() * m.value_proj(embedded).unsqueeze(-2)).flatten(-2)
        normed = m.norm_conv(value)
        past = part.before((self.layer, "short"), normed, m.short_conv_state_len)
        short = F.silu(m.conv1d(torch.cat([past, normed], 1).transpose(1, 2))).transpose(1, 2)
        return value + short
