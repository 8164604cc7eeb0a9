"""Features made while training: nothing is written. Producers are given the trainer's rows in the trainer's order.

Rows that share a forward pass (`stream.group`) are neighbours in that order, so what is computed hangs on the order alone: not on
which producer made it, nor on how far ahead it was. A row alone (group 1) has the bits that `capture` gives it in a batch of its own
(`capture.batch_tokens=1`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import torch

from specgraft.records import Conversation, Features
from specgraft.stream.memory import MemoryStream
from specgraft.stream.parcels import Failed, Parcel, parcel, unpacked
from specgraft.stream.source import BadRows, rows_digest

Batches = Iterable[list[Conversation]]
Make = Callable[[Batches], Generator[Parcel | Failed]]  # of batches of rows, in that order; bounded ahead by itself


class Counts:
    """What went on since it was last asked. Filled by who makes rows and by who waits for them."""

    def __init__(self) -> None:
        self.waited = self.busy = 0.0  # seconds, since `since`
        self.lanes = 1  # producers that could be busy
        self.held = self.queued = self.peak = 0.0  # bytes and rows that wait now, most bytes so far
        self.since = time.monotonic()

    def facts(self) -> dict[str, float]:
        now = time.monotonic()
        passed, self.since = max(now - self.since, 1e-9), now
        found = {
            "wait_seconds": self.waited, "producer_share": min(1.0, self.busy / (passed * self.lanes)),
            "queue_bytes": self.held, "queue_rows": self.queued, "queue_peak_bytes": self.peak,
        }  # fmt: skip
        self.waited = self.busy = 0.0
        return found


class LiveSource:
    """The rows of one split, each made when its turn comes. A source of the media "memory" and "ray" (`stream.source`)."""

    def __init__(
        self, rows: Sequence[Conversation], digests: Mapping[str, str], header: Mapping[str, Any], make: Make, counts: Counts,
        group: int = 1, bad_rows: str = "stop",
    ) -> None:  # fmt: skip
        """`rows`: as capture would see them; `digests`: of their whole texts' ids, by id; `header`: of the features.

        Raises ValueError for a split without rows.
        """
        if not rows:
            raise ValueError("stream: a split has no row from which anything can be learnt; raise capture.max_length or regen.max_new_tokens")
        self.conversations, self.digests, self.header, self.make, self.group = list(rows), digests, header, make, group
        self.dtype: torch.dtype = getattr(torch, header["target"]["dtype"])
        self.counts = counts
        self.bad = BadRows(bad_rows, len(rows))

    @property
    def ids(self) -> list[str]:
        return [row.prompt_id for row in self.conversations]

    @property
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self.conversations]

    def digest(self) -> str:
        return rows_digest(self.header, [(name, self.digests[name]) for name in self.ids])

    def parcels(self, order: Iterable[int]) -> Iterator[tuple[Conversation, Parcel | None]]:
        """Every row of the order with its states; None for a bad one that is skipped."""
        wanted: list[Conversation] = []  # handed to the producers and not come back

        def batches() -> Iterator[list[Conversation]]:
            following = iter(order)
            while batch := [self.conversations[index] for index in islice(following, self.group)]:
                wanted.extend(batch)
                yield batch

        with closing(self.make(batches())) as made:
            while True:
                began = time.monotonic()
                found = next(made, None)
                self.counts.waited += time.monotonic() - began
                if found is None:
                    return
                row = wanted.pop(0)
                if isinstance(found, Failed):
                    self.bad(row.prompt_id, found.why)
                yield row, None if isinstance(found, Failed) else found

    def rows(self, order: Iterable[int]) -> Iterator[Features | None]:
        """As `stream.source.Source.rows`."""
        with closing(self.parcels(order)) as found:  # type: ignore[type-var]
            for row, one in found:
                yield None if one is None else unpacked(one, row, self.dtype)

    def facts(self) -> dict[str, float]:
        return {**self.counts.facts(), "skipped": float(len(self.bad.found))}


def in_a_thread(
    produce: Callable[[Batches], Generator[Features]], coded: bool, fault_of: Callable[[Features], str | None], bound: float, counts: Counts
) -> Make:
    """A producer of this process (its target, or servers that it asks) behind a queue of at most `bound` bytes."""

    def parcels(batches: Batches) -> Iterator[Parcel | Failed]:
        with closing(produce(batches)) as rows:
            while True:
                began = time.monotonic()
                row = next(rows, None)
                if row is None:
                    return
                found = parcel(row, coded, fault_of)
                counts.busy += time.monotonic() - began
                yield found

    def make(batches: Batches) -> Generator[Parcel | Failed]:
        with MemoryStream(parcels(batches), bound, lambda found: found.bytes) as stream:
            for found in stream:
                counts.held, counts.queued, counts.peak = stream.held, len(stream), max(counts.peak, stream.peak)
                yield found

    return make
