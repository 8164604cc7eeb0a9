"""Which conversations make step n, and how they become batches. A step depends on the seed and n alone, however it is shared out.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

import torch

from specgraft.distill.anchors import branch_anchors, branch_points, choose_anchors
from specgraft.distill.batch import Batch
from specgraft.drafters.drafter import Texts
from specgraft.records import Features
from specgraft.stream.source import Source
from specgraft.train.shares import Micro, Share, lay_out, share_out


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
    among: Among | None = None,
) -> Batch:
    """One batch of conversations cut at `max_length` tokens, with their anchors.

    `row_tokens` > 0 packs them into rows of that many tokens: the anchors stay those that each has in a row of its own.
    A conversation without a legal anchor is left out (unless none has one: then the first stays, with no slot).
    `end_ids`: the anchors are those of branches, any token of the answer but these. `among`: they are a part of a step.
    """
    return micro_batch(rows, anchors, draft_tokens, max_length, generator, device, row_tokens, end_ids, among).batch


@dataclass(frozen=True)
class Among:
    """Where some conversations stand in their step. Filled by `step_shares`."""

    lengths: Sequence[int]  # tokens of every conversation of the step, cut
    places: Sequence[int]  # of these in it


def micro_batch(
    rows: Sequence[Features], anchors: int, draft_tokens: int, max_length: int, generator: torch.Generator, device: torch.device,
    row_tokens: int = 0, end_ids: Sequence[int] | None = None, among: Among | None = None,
) -> Micro:  # fmt: skip
    """As `collate`, with what is known of its conversations."""
    ids, masks, taps, last = (
        [getattr(row, name)[:max_length] for row in rows] for name in ("input_ids", "loss_mask", "taps", "last")
    )
    lengths = [len(row) for row in ids]
    among = among or Among(lengths, range(len(rows)))
    # drawn by conversation, before they are laid out, for all of the step
    rank = torch.rand((len(among.lengths), max(among.lengths)), generator=generator)[list(among.places)]
    points = None if end_ids is None else [branch_points(own, mask, end_ids) for own, mask in zip(ids, masks, strict=True)]
    legal = points if points is not None else [mask[:-1] & mask[1:] for mask in masks]
    kept = [min(anchors, int(any_anchor.sum())) for any_anchor in legal]
    layout = lay_out(lengths, kept, row_tokens)
    starts = layout.starts()
    ranks = layout.fill([row[:length] for row, length in zip(rank, lengths, strict=True)])
    loss_mask = layout.fill(masks)
    if points is None:
        drawn = choose_anchors(ranks, loss_mask, starts, anchors, draft_tokens)
    else:
        drawn = branch_anchors(ranks, layout.fill(points), starts, anchors, draft_tokens)
    texts = Texts(layout.fill(ids).to(device), layout.fill(taps).to(device), starts.to(device))
    batch = Batch(texts, layout.fill(last).to(device), drawn.to(device), loss_mask.to(device))
    return Micro(batch, layout, tuple(among.places), tuple(kept))


def step_batches(
    source: Source, rows: int, anchors: int, draft_tokens: int, max_length: int, seed: int, first: int, stop: int,
    device: torch.device, row_tokens: int = 0, end_ids: Sequence[int] | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of steps `first` .. `stop`-1; `end_ids` as in `collate`. Raises ValueError for a step of which no row is left."""
    for share in step_shares(source, rows, anchors, draft_tokens, max_length, seed, first, stop, device, row_tokens, end_ids):
        (micro,) = share.micros
        assert micro is not None, "one micro-batch has every row"
        yield micro.batch


def step_shares(
    source: Source, rows: int, anchors: int, draft_tokens: int, max_length: int, seed: int, first: int, stop: int,
    device: torch.device, row_tokens: int = 0, end_ids: Sequence[int] | None = None, accumulate: int = 1, rank: int = 0, ranks: int = 1,
) -> Iterator[Share]:  # fmt: skip
    """The part of rank `rank` in steps `first` .. `stop`-1: `accumulate` micro-batches. Only its own rows are asked for.

    Raises ValueError for a step of which no row is left.
    """
    tokens = source.lengths

    def plan(step: int) -> tuple[list[int], list[int], list[list[int]]]:
        """Rows of the step, their lengths, and which of them are in each micro-batch of this rank."""
        chosen = step_rows(len(tokens), rows, seed, step)
        lengths = [min(tokens[index], max_length) for index in chosen]
        return chosen, lengths, share_out(lengths, accumulate * ranks)[rank::ranks]

    order = (chosen[place] for chosen, _, parts in map(plan, range(first, stop)) for part in parts for place in part)
    with closing(source.rows(order)) as found:  # type: ignore[type-var]  # what is left running behind it stops
        for step in range(first, stop):
            _, lengths, parts = plan(step)
            micros: list[Micro | None] = []
            for part in parts:
                there = [(place, row) for place, row in ((place, next(found)) for place in part) if row is not None]
                among = Among(lengths, [place for place, _ in there])
                micros.append(
                    micro_batch(
                        [row for _, row in there], anchors, draft_tokens, max_length, step_generator(seed, step, "anchors"), device,
                        row_tokens, end_ids, among,
                    ) if there else None
                )  # fmt: skip
            if ranks == 1 and not any(micros):
                raise ValueError(f"train: all {rows} rows of step {step + 1} were left out as bad; set stream.bad_rows=\"stop\" to see why")
            yield Share(step, micros, lengths, row_tokens)
