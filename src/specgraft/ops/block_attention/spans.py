"""Which keys a block of drafted slots may read, as ranges (algorithms.md 2.4).

Legend: B batch, N blocks, S slots a block, T context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Spans:
    """Which context tokens each block reads, and how its slots see one another.

    Slot o of a block sits at index end + o. It sees context token kv if and only if
    first <= kv < end and (window == 0 or end + o - kv < window). Make a new one rather than write into its tensors.
    """

    first: torch.Tensor  # [B, N] long, first visible token (start of the document in a packed row)
    end: torch.Tensor  # [B, N] long, one behind the last visible token (the anchor; in decode the cached length)
    causal: bool = False  # within the block slot o sees slots <= o (True) or all slots (False)
    window: int = 0  # 0: full attention. The block part ignores it (a block is shorter than a window)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # derived masks, for all layers

    def lowest(self, slots: int) -> torch.Tensor:
        """[B, N, S] long: first visible token of every slot; a result >= end means that the slot sees no context."""
        first = self.first[..., None].expand(*self.first.shape, slots)
        if self.window == 0:
            return first
        index = self.end[..., None] + torch.arange(slots, device=self.end.device)
        return torch.maximum(first, index - self.window + 1)

    def context_mask(self, slots: int, length: int) -> torch.Tensor:
        """[B, N, S, T] bool: context tokens that every slot sees."""
        token = torch.arange(length, device=self.end.device)
        return (token >= self.lowest(slots)[..., None]) & (token < self.end[..., None, None])

    def block_mask(self, slots: int) -> torch.Tensor:
        """[S, S] bool: slots (second index) that a slot (first index) of the same block sees."""
        every = torch.ones(slots, slots, dtype=torch.bool, device=self.end.device)
        return every.tril() if self.causal else every
