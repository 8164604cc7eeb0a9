"""Which conversations make step n, and how they become one batch. A step depends on the seed and n alone.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import chain

import torch

from specgraft.distill.anchors import branch_anchors, branch_points, choose_anchors
from specgraft.distill.batch import Batch
from specgraft.drafters.drafter import Texts
from specgraft.records import Features
from specgraft.stream.source import Source
from specgraft.train.packing import pack


def step_generator(seed: int, step: int, what: str) -> torch.Generator:
    """A random stream that belongs to one step: resuming needs no stored state for it."""
    salt = {"order": 1, "anchors": 2, "slots": 3, "branches": 4, "rollouts": 5}[what]
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 8 + salt)


def step_rows(count: int, rows: int, seed: int, step: int) -> list[int]:
    """Indices of the conversations of a step: epochs are permutations, cut into batches; a left-over goes on in the next."""
    first = step * rows
    chosen: list[int] = []
    for place in range(first, first + rows):
        epoch, within = divmod(place, count)
        if not chosen or within == 0 or place == first:
            order = epoch_order(count, seed, epoch)
        chosen.append(int(order[within]))
    return chosen


@lru_cache(maxsize=2)  # a step may span two
def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation [count] that belongs to the epoch."""
    return torch.randperm(count, generator=step_generator(seed, epoch, "order"))


def collate(
    rows: Sequence[Features],
    anchors: int,
    draft_tokens: int,
    max_length: int,
    generator: torch.Generator,
    device: torch.device,
    row_tokens: int = 0,
    end_ids: Sequence[int] | None = None,
) -> Batch:
    """One batch of conversations cut at `max_length` tokens, with their anchors.

    `row_tokens` > 0 packs them into rows of that many tokens: the anchors stay those that each has in a row of its own.
    A conversation without a legal anchor is left out (unless none has one: then the first stays, with no slot).
    `end_ids`: the anchors are those of branches, any token of the answer but these.
    """
    ids, masks, taps, last = (
        [getattr(row, name)[:max_length] for row in rows] for name in ("input_ids", "loss_mask", "taps", "last")
    )
    lengths = [len(row) for row in ids]
    rank = torch.rand((len(rows), max(lengths)), generator=generator)  # drawn by conversation, before they are laid out
    points = None if end_ids is None else [branch_points(own, mask, end_ids) for own, mask in zip(ids, masks, strict=True)]
    legal = points if points is not None else [mask[:-1] & mask[1:] for mask in masks]
    barren = frozenset(index for index, any_anchor in enumerate(legal) if not any_anchor.any())
    layout = pack(lengths, row_tokens, barren if len(barren) < len(rows) else barren - {0})
    starts = layout.starts()
    ranks = layout.fill([row[:length] for row, length in zip(rank, lengths, strict=True)])
    loss_mask = layout.fill(masks)
    if points is None:
        drawn = choose_anchors(ranks, loss_mask, starts, anchors, draft_tokens)
    else:
        drawn = branch_anchors(ranks, layout.fill(points), starts, anchors, draft_tokens)
    texts = Texts(layout.fill(ids).to(device), layout.fill(taps).to(device), starts.to(device))
    return Batch(texts, layout.fill(last).to(device), drawn.to(device), loss_mask.to(device))


def step_batches(
    source: Source, rows: int, anchors: int, draft_tokens: int, max_length: int, seed: int, first: int, stop: int,
    device: torch.device, row_tokens: int = 0, end_ids: Sequence[int] | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of steps `first` .. `stop`-1; `end_ids` as in `collate`. Raises ValueError for a step of which no row is left."""
    count = len(source.ids)
    order = chain.from_iterable(step_rows(count, rows, seed, step) for step in range(first, stop))
    with closing(source.rows(order)) as found:  # type: ignore[type-var]  # what is left running behind it stops
        for step in range(first, stop):
            chosen = [row for row in (next(found) for _ in range(rows)) if row is not None]
            if not chosen:
                raise ValueError(f"train: all {rows} rows of step {step + 1} were left out as bad; set stream.bad_rows=\"stop\" to see why")
            yield collate(chosen, anchors, draft_tokens, max_length, step_generator(seed, step, "anchors"), device, row_tokens, end_ids)
