"""One training batch, and the supervised slots in it.

Legend: B rows, T tokens, N anchors, G draft tokens, K taps, D hidden size, R supervised slots, U source positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.distill.anchors import Anchors
from specgraft.drafters.drafter import Texts


@dataclass(frozen=True)
class Batch:
    """Padded conversations of one step, on the trainer's device. Filled by `train.batch`."""

    texts: Texts
    last: torch.Tensor  # [B, T, D]
    anchors: Anchors
    loss_mask: torch.Tensor | None = None  # [B, T] bool, tokens of the answers; rollouts find the prompts by it


@dataclass(frozen=True)
class Slots:
    """The slots that are learnt from, in order of row, block, slot. Filled by `supervised`."""

    row: torch.Tensor  # [R]
    block: torch.Tensor  # [R]
    slot: torch.Tensor  # [R] j-1
    label: torch.Tensor  # [R] x_{a+j}
    places: torch.Tensor  # [U] row * T + (a+j-1): distinct source positions; the target's law p_j and the token before are theirs
    source: torch.Tensor  # [R] row of `places`

    def __len__(self) -> int:
        return len(self.row)

    def grid(self, values: torch.Tensor, like: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """values [R] at their places in a [B,N,G] tensor of the shape of `like`."""
        out = torch.full(like.shape, fill, dtype=values.dtype, device=values.device)
        out[self.row, self.block, self.slot] = values
        return out


def supervised(batch: Batch, mask: torch.Tensor) -> Slots:
    """The slots of mask [B,N,G]."""
    row, block, slot = mask.nonzero(as_tuple=True)
    ids = batch.texts.input_ids
    before = batch.anchors.position[row, block] + slot
    places, source = torch.unique(row * ids.shape[1] + before, return_inverse=True)
    return Slots(row, block, slot, ids[row, before + 1], places, source)
