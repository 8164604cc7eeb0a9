"""Which conversations make step n, and how they become one padded batch. A step depends on the seed and n alone.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from specgraft.distill.anchors import draw_anchors
from specgraft.distill.batch import Batch
from specgraft.drafters.drafter import Texts
from specgraft.records import Features
from specgraft.stream.shards import ShardReader


def step_generator(seed: int, step: int, what: str) -> torch.Generator:
    """A random stream that belongs to one step: resuming needs no stored state for it."""
    salt = {"order": 1, "anchors": 2, "slots": 3}[what]
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 8 + salt)


def step_rows(count: int, rows: int, seed: int, step: int) -> list[int]:
    """Indices of the conversations of a step: epochs are permutations, cut into batches; a left-over goes on in the next."""
    first = step * rows
    chosen: list[int] = []
    for place in range(first, first + rows):
        epoch, within = divmod(place, count)
        if not chosen or within == 0 or place == first:
            order = torch.randperm(count, generator=step_generator(seed, epoch, "order"))
        chosen.append(int(order[within]))
    return chosen


def collate(
    rows: Sequence[Features], anchors: int, draft_tokens: int, max_length: int, generator: torch.Generator, device: torch.device
) -> Batch:
    """Pads rows on the right and draws their anchors. Rows are cut at `max_length` tokens."""
    cut = [slice(0, max_length)] * len(rows)
    ids = pad_sequence([row.input_ids[c] for row, c in zip(rows, cut, strict=True)], batch_first=True)
    loss_mask = pad_sequence([row.loss_mask[c] for row, c in zip(rows, cut, strict=True)], batch_first=True)
    taps = pad_sequence([row.taps[c] for row, c in zip(rows, cut, strict=True)], batch_first=True)
    last = pad_sequence([row.last[c] for row, c in zip(rows, cut, strict=True)], batch_first=True)
    drawn = draw_anchors(loss_mask, anchors, draft_tokens, generator)
    moved = type(drawn)(drawn.position.to(device), drawn.keep.to(device), drawn.mask.to(device))
    texts = Texts(ids.to(device), taps.to(device), torch.zeros_like(ids).to(device))
    return Batch(texts, last.to(device), moved)


def step_batches(
    reader: ShardReader, rows: int, anchors: int, draft_tokens: int, max_length: int, seed: int, first: int, stop: int,
    device: torch.device,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of steps `first` .. `stop`-1."""
    for step in range(first, stop):
        chosen = [reader[index] for index in step_rows(len(reader), rows, seed, step)]
        yield collate(chosen, anchors, draft_tokens, max_length, step_generator(seed, step, "anchors"), device)
