"""Sparse attention of a target (QSA): which groups of tokens a query may read.

The indexer's keys are averaged over complete groups of tokens, normed, and rotated as their first token; the best groups of a
query and the open group at its end are what its attention sees. Source: transformers' qwen4_exp; targets.md 3.
Legend: R rows, T tokens, H indexer heads, d indexer head size, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from specgraft.targets.parts import Part, SparseIndex, Work


class Indexer:
    """Runs one indexer module of the model over the parts of a pass; its attention then finds the choice in the part."""

    def __init__(self, module: Any, layer: int, base: Any) -> None:
        self.module, self.layer, self.rotary = module, layer, base.rotary_emb
        self.index = SparseIndex(module.compress_ratio, module.block_topk, self.pool)

    def __call__(self, work: Work, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], *rest: Any) -> torch.Tensor:
        cos, sin = angles
        pieces = zip(work.parts, *(work.split(x) for x in (hidden, cos, sin)), strict=True)
        for part, *values in pieces:
            part.chosen[self.layer] = self.part(part, *values)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)  # transformers' mask stays as it is

    def part(self, part: Part, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        m = self.module
        both = m.index_qk_proj(hidden).unflatten(-1, (-1, m.index_head_dim))
        query = rotate(m.q_layernorm(both[..., : m.index_n_heads, :]), cos[..., None, :], sin[..., None, :])
        return part.choose(self.layer, query, both[..., m.index_n_heads, :], self.index)

    def pool(self, raw: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Group keys [R,G,d] from raw keys [R,G,ratio,d] and the position [R,G] of each group's first token."""
        wide = torch.float64 if raw.dtype == torch.float64 else torch.float32
        normed = self.module.k_layernorm(raw.to(wide).mean(-2).to(raw.dtype))
        if not first.shape[1]:
            return normed
        cos, sin = self.rotary(raw, first[None])
        return rotate(normed, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first cos.shape[-1] channels of x [.., d]; the others pass."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
