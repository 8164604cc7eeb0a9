"""Work that is lent to producers and handed over in the order in which it was asked for.

A lease is a few rows that share a forward pass. It is lent once, comes back to be lent to another producer where its own died, and
is acknowledged by being taken. Bytes are counted from the moment of lending, so that what is under way is inside the bound too.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specgraft.records import Conversation
from specgraft.stream.live import Counts
from specgraft.stream.parcels import Failed, to_wire


@dataclass(frozen=True)
class Lease:
    """Rows that one producer makes in one pass. Filled by `Leases.next`."""

    number: int
    rows: list[Conversation]
    bytes: int


class Leases:
    """Lends the batches of an order to any number of threads, and gives what they made to one."""

    def __init__(
        self, batches: Iterable[list[Conversation]], bound: float, size: Callable[[Conversation], int], tries: int, counts: Counts
    ) -> None:
        """At most `bound` bytes are lent or wait (one lease is always admitted); `tries` of one lease that fails by itself."""
        self.bound, self.size, self.tries, self.counts = bound, size, tries, counts
        self._batches = enumerate(batches)
        self._change = threading.Condition()
        self._front: Lease | None = None  # drawn, and not admitted yet
        self._again: list[tuple[int, Lease]] = []  # lent before; the producer died or failed
        self._out: dict[int, Lease] = {}
        self._failures: dict[int, int] = {}
        self._ready: dict[int, tuple[Lease, Any]] = {}
        self._taken = 0
        self._drawn_all = self._over = False
        self._error: ValueError | None = None
        self.held = 0

    def next(self) -> Lease | None:
        """The first lease that nobody has; waits while the bound is reached, or while one may come back. None: all is done, or over."""
        with self._change:
            while not self._over:
                lease = self._admitted()
                if lease is not None:
                    self._out[lease.number] = lease
                    return lease
                if self._drawn_all and not self._out and not self._again:
                    return None
                self._change.wait()
            return None

    def _admitted(self) -> Lease | None:
        if self._again:
            return heapq.heappop(self._again)[1]
        if self._front is None and not self._drawn_all:
            drawn = next(self._batches, None)
            if drawn is None:
                self._drawn_all = True
                self._change.notify_all()
                return None
            number, rows = drawn
            self._front = Lease(number, rows, sum(self.size(row) for row in rows))
        lease = self._front
        if lease is None or (self.held and self.held + lease.bytes > self.bound):
            return None
        self._front = None
        self.held += lease.bytes
        self.counts.held, self.counts.peak = self.held, max(self.counts.peak, self.held)
        return lease

    def done(self, lease: Lease, made: Any) -> None:
        """What was made of it. Of two that made the same, the first counts."""
        with self._change:
            if self._out.pop(lease.number, None) is not None:
                self._ready[lease.number] = (lease, made)
                self.counts.queued += len(lease.rows)
                self._change.notify_all()

    def lost(self, lease: Lease) -> None:
        """Its producer died: the next one who asks gets it."""
        with self._change:
            if self._out.pop(lease.number, None) is not None:
                heapq.heappush(self._again, (lease.number, lease))
                self._change.notify_all()

    def failed(self, lease: Lease) -> bool:
        """It failed and its producer lives. True: it will be tried again."""
        with self._change:
            self._failures[lease.number] = self._failures.get(lease.number, 0) + 1
            again = self._failures[lease.number] < self.tries
        if again:
            self.lost(lease)
        return again

    def stop(self, error: ValueError) -> None:
        """Nobody is left to make the rest: whoever takes is told."""
        with self._change:
            self._error = self._error or error
            self._over = True
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._over = True
            self._batches = enumerate(())
            self._change.notify_all()

    def take(self) -> tuple[Lease, Any] | None:
        """The next lease of the order with what was made of it; None behind the last. Raises the error of `stop`."""
        with self._change:
            while self._taken not in self._ready:
                if self._error is not None:
                    raise self._error
                if self._over or (self._drawn_all and not self._out and not self._again and self._front is None):
                    return None
                self._change.wait()
            lease, made = self._ready.pop(self._taken)
            self._taken += 1
            self.held -= lease.bytes
            self.counts.held, self.counts.queued = self.held, self.counts.queued - len(lease.rows)
            self._change.notify_all()
            return lease, made


def worked(leases: Leases, work: Callable[[Lease], Any], stopped: type[ValueError], lost: type[Exception]) -> None:
    """A thread's life: leases are worked off until none is left. `work` raises `lost` where its producer died, `stopped` where it
    died for good, anything else where this lease failed."""
    while (lease := leases.next()) is not None:
        try:
            made = work(lease)
        except lost:
            leases.lost(lease)
        except stopped as error:
            leases.lost(lease)
            leases.stop(error)
            return
        except Exception as error:
            if not leases.failed(lease):
                why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                names = ", ".join(row.prompt_id for row in lease.rows)
                leases.done(lease, [to_wire(Failed(row.prompt_id, f"{names}: failed {leases.tries} times; the last: {why}")) for row in lease.rows])
        else:
            leases.done(lease, made)
