"""What training asks for features: rows of one split, in an order that was decided before any of them exists.

The order is the trainer's (`train.batch`): it hangs on the seed, the step and the lengths. A medium only has to deliver the rows
asked for, in the order asked for, bounded ahead; how many producers there are, how fast they are and whether one of them died
cannot change what is trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from specgraft.log import say
from specgraft.records import Features

SKIPPED_SHARE = 0.01  # more bad rows than this stop a run that skips them (one is always admitted)


class Source(Protocol):
    """The features of one split."""

    @property
    def ids(self) -> list[str]:
        """Ids of the rows, in the order of the conversations."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        ...

    def digest(self) -> str:
        """Of the target, the dtype and the rows: the same for every medium."""
        ...

    def rows(self, order: Iterable[int]) -> Iterator[Features | None]:
        """The features of these rows, in exactly this order; None in the place of a bad one where `stream.bad_rows` is "skip".

        Closing the iterator stops what works ahead of it. Raises ValueError, in one line, for a bad row, and where nobody is left
        to make the rows.
        """
        ...

    def facts(self) -> dict[str, float]:
        """Since the last call, for the metrics: `wait_seconds` for a row that was not there yet, `producer_share` of the time in which
        producers worked; and now: `queue_bytes`, `queue_rows`, `skipped` rows in all."""
        ...


Open = Callable[[str, Mapping[str, str]], Source]  # a split and its rows' digests by id -> their features


def rows_digest(header: Mapping[str, Any], rows: Iterable[tuple[str, str]]) -> str:
    """Of the target, the dtype and the (id, digest of the ids) of every row in their order: other text gives another digest."""
    head = [header["target"]["weights"], *(["fp8"] if header.get("dtype") == "fp8" else [])]
    text = "|".join([*head, *(f"{name}:{value}" for name, value in rows)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BadRows:
    """Stops at a bad row, or counts it and goes on, by `stream.bad_rows`."""

    def __init__(self, policy: str, rows: int) -> None:
        self.policy, self.limit = policy, max(1, int(SKIPPED_SHARE * rows))
        self.found: dict[str, str] = {}  # why, by id

    def __call__(self, prompt_id: str, why: str) -> None:
        """Raises ValueError for a row that is bad, or for one too many. A row that comes again counts once."""
        if self.policy == "stop":
            raise ValueError(why)
        if prompt_id in self.found:
            return
        self.found[prompt_id] = why
        say(f"stream: {prompt_id} left out: {why}")
        if len(self.found) > self.limit:
            raise ValueError(f"stream: {len(self.found)} bad rows, {self.limit} are admitted (1 %); the last: {why}")

