"""One training batch, its blocks as data, and the supervised slots in them.

Legend: B rows, T tokens, N blocks, G draft tokens, K taps, D hidden size, R supervised slots, X target states, U those that slots read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.distill.anchors import Anchors
from specgraft.drafters.drafter import Texts


@dataclass(frozen=True)
class Draws:
    """Where the anchors of a part of a step stand in the batch of the whole step. Filled by `train.shares`."""

    rows: int  # B of the whole step
    blocks: int  # N of the whole step
    place: torch.Tensor  # [B, N] long, on the CPU: row * blocks + block there; 0 where not kept


@dataclass(frozen=True)
class Batch:
    """Padded conversations of one step, or of a part of one, on the trainer's device. Filled by `train.batch`."""

    texts: Texts
    last: torch.Tensor  # [B, T, D]
    anchors: Anchors
    loss_mask: torch.Tensor | None = None  # [B, T] bool, tokens of the answers; rollouts find the prompts by it
    draws: Draws | None = None  # None: this is the whole step

    def to(self, device: torch.device) -> Batch:
        texts = Texts(self.texts.input_ids.to(device), self.texts.taps.to(device), self.texts.starts.to(device))
        mask = None if self.loss_mask is None else self.loss_mask.to(device)
        return Batch(texts, self.last.to(device), self.anchors.to(device), mask, self.draws)

    def uniforms(
        self, each: int, size: int, generator: torch.Generator | None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """[B, N*each, size] in [0,1) on the CPU: an anchor has the same numbers however its step is shared out."""
        if self.draws is None:
            rows, blocks = self.anchors.position.shape
            return torch.rand((rows, blocks * each, size), generator=generator, dtype=dtype)
        whole = torch.rand((self.draws.rows, self.draws.blocks * each, size), generator=generator, dtype=dtype)
        return whole.view(-1, each, size)[self.draws.place].flatten(1, 2)


@dataclass(frozen=True)
class Blocks:
    """What blocks are taught: the tokens in them and the target's states. Filled by `references`, or from branches.

    Slots that read one state have one token before them.
    """

    mask: torch.Tensor  # [B, N, G] bool: slot j-1 is supervised
    tokens: torch.Tensor  # [B, N, G+1] the anchor's token and those of the slots: slot j-1 lies behind tokens[.., j-1]
    states: torch.Tensor  # [X, D] outputs of the target's last layer, before the final norm
    places: torch.Tensor  # [B, N, G] row of `states` that gives the target's law p_j


@dataclass(frozen=True)
class Slots:
    """The slots that are learnt from, in order of row, block, slot. Filled by `supervised`."""

    row: torch.Tensor  # [R]
    block: torch.Tensor  # [R]
    slot: torch.Tensor  # [R] j-1
    label: torch.Tensor  # [R] the slot's token: x_{a+j} of the text, or d_j of a branch
    places: torch.Tensor  # [U] rows of `Blocks.states`, distinct
    before: torch.Tensor  # [U] the token before the slots of each
    source: torch.Tensor  # [R] row of `places` and `before`

    def __len__(self) -> int:
        return len(self.row)

    def grid(self, values: torch.Tensor, like: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """values [R] at their places in a [B,N,G] tensor of the shape of `like`."""
        out = torch.full(like.shape, fill, dtype=values.dtype, device=values.device)
        out[self.row, self.block, self.slot] = values
        return out


def references(batch: Batch) -> Blocks:
    """The blocks at the batch's anchors, taught by its texts: slot j has the token at a+j and the state at a+j-1."""
    ids, anchors = batch.texts.input_ids, batch.anchors
    place = anchors.position[..., None] + torch.arange(anchors.mask.shape[2] + 1, device=ids.device)
    place = place.clamp(max=ids.shape[1] - 1)
    row = torch.arange(len(ids), device=ids.device)[:, None, None]
    return Blocks(anchors.mask, ids[row, place], batch.last.flatten(0, 1), (row * ids.shape[1] + place)[..., :-1])


def supervised(blocks: Blocks) -> Slots:
    """The slots of the blocks' mask."""
    row, block, slot = blocks.mask.nonzero(as_tuple=True)
    places, source = torch.unique(blocks.places[row, block, slot], return_inverse=True)
    before = torch.empty_like(places)
    before[source] = blocks.tokens[row, block, slot]  # equal where the place is
    return Slots(row, block, slot, blocks.tokens[row, block, slot + 1], places, before, source)
