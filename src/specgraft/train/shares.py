"""A step shared out: which of its conversations are in which micro-batch of which rank, and what does not hang on that.

A conversation's anchors and its random numbers are those that it has in the batch of the whole step: numbers are drawn for that
one, whose shape follows from the lengths and from how many anchors each conversation keeps.
Legend: B rows, N anchors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch, Draws
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Texts
from specgraft.train.packing import Layout, pack


@dataclass(frozen=True)
class Micro:
    """Some conversations of a step as one batch. Filled by `train.batch`."""

    batch: Batch
    layout: Layout
    places: tuple[int, ...]  # in the step, of the conversations that the layout numbers
    kept: tuple[int, ...]  # anchors that each keeps


@dataclass(frozen=True)
class Share:
    """What one rank works on in one step. Filled by `train.batch`."""

    step: int
    micros: list[Micro | None]  # as many on every rank; None has no conversation
    lengths: list[int]  # tokens of every conversation of the step, cut
    row_tokens: int

    def kept(self) -> torch.Tensor:
        """[rows of the step] anchors kept by the conversations of this rank; their sum over ranks is that of every one."""
        found = torch.zeros(len(self.lengths), dtype=torch.long)
        for micro in self.micros:
            if micro is not None:
                found[list(micro.places)] = torch.tensor(micro.kept)
        return found

    def blocks(self, kept: Sequence[int]) -> Iterator[tuple[int, int, slice, slice]]:
        """Where the anchors of this rank's conversations are: micro-batch, row, places in it; and places among those of the whole
        step by conversation, of which each has `kept`."""
        starts = [0, *accumulate(kept)]
        for number, micro in enumerate(self.micros):
            for row, members in enumerate(micro.layout.rows if micro is not None else ()):
                assert micro is not None
                for index, before in offsets(members, micro.kept):
                    count, start = micro.kept[index], starts[micro.places[index]]
                    yield number, row, slice(before, before + count), slice(start, start + count)

    def placed(self, kept: Sequence[int]) -> list[Batch | None]:
        """The batches, each knowing where its anchors stand in the batch of the whole step; `kept` of every conversation."""
        whole = lay_out(self.lengths, kept, self.row_tokens)
        blocks = max(1, max(sum(kept[index] for index in row) for row in whole.rows))
        first = {index: number * blocks + before for number, row in enumerate(whole.rows) for index, before in offsets(row, kept)}
        found: list[Batch | None] = []
        for micro in self.micros:
            if micro is None:
                found.append(None)
                continue
            place = torch.zeros(micro.batch.anchors.position.shape, dtype=torch.long)
            for number, row in enumerate(micro.layout.rows):
                for index, before in offsets(row, micro.kept):
                    count = micro.kept[index]
                    if count:
                        place[number, before : before + count] = first[micro.places[index]] + torch.arange(count)
            found.append(replace(micro.batch, draws=Draws(len(whole.rows), blocks, place)))
        return found


def offsets(row: Sequence[int], kept: Sequence[int]) -> list[tuple[int, int]]:
    """Every conversation of a row with the number of anchors before its own."""
    found, before = [], 0
    for index in row:
        found.append((index, before))
        before += kept[index]
    return found


def lay_out(lengths: Sequence[int], kept: Sequence[int], row_tokens: int) -> Layout:
    """Rows of a batch; a conversation that keeps no anchor is left out, unless none keeps one: then the first stays."""
    barren = frozenset(index for index, count in enumerate(kept) if not count)
    return pack(lengths, row_tokens, barren if len(barren) < len(lengths) else barren - {0})


def share_out(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Places of a step's conversations in each of `shares` micro-batches: longest first into the one with the fewest tokens.

    All are as even as that makes them; with more shares than conversations some are empty. One share has them all, in order.
    """
    found: list[list[int]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        least = filled.index(min(filled))
        found[least].append(place)
        filled[least] += lengths[place]
    return [sorted(share) for share in found]


def stand_in(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> Batch:
    """A batch with nothing to learn: what a rank without a conversation takes part with. It adds exactly zero to every sum."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    taps = torch.zeros(1, 2, len(config.taps), config.hidden_size, dtype=dtype)
    position = torch.zeros(1, 1, dtype=torch.long)
    anchors = Anchors(position, position.bool(), torch.zeros(1, 1, config.draft_tokens, dtype=torch.bool))
    draws = Draws(1, 1, position)
    return Batch(Texts(ids, taps, ids.clone()), taps[:, :, 0].clone(), anchors, ids.bool(), draws).to(device)
