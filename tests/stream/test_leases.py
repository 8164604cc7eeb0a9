"""Work that is lent: in order, inside the bound, once, whoever dies or fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from media import bytes_of, conversations

from specgraft.stream.leases import Lease, Leases, worked
from specgraft.stream.live import Counts
from specgraft.stream.parcels import Failed, from_wire

SIZE = 18 * 3 * 8 * 4  # of the largest row


class Gone(Exception): ...


class Final(ValueError): ...


def lend(count: int, bound: float = 1e9, tries: int = 3) -> Leases:
    rows = conversations(count)
    return Leases([[row] for row in rows], bound, bytes_of, tries, Counts())


def start(leases: Leases, work: Any) -> threading.Thread:
    thread = threading.Thread(target=worked, args=(leases, work, Final, Gone), daemon=True)
    thread.start()
    return thread


def taken(leases: Leases) -> list[str]:
    found = []
    while (one := leases.take()) is not None:
        assert one[1] == one[0].number
        found.append(one[0].rows[0].prompt_id)
    return found


def test_two_producers_of_different_speed_and_everything_once_in_order() -> None:
    leases, did = lend(60, bound=6 * SIZE), {"fast": 0, "slow": 0}

    def work(name: str, seconds: float) -> Any:
        def run(lease: Lease) -> int:
            assert leases.held <= 6 * SIZE
            time.sleep(seconds)
            did[name] += 1
            return lease.number

        return run

    threads = [start(leases, work("fast", 0.001)), start(leases, work("slow", 0.01))]
    assert taken(leases) == [f"p{n}" for n in range(60)]
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert did["fast"] > did["slow"] and sum(did.values()) == 60 and leases.held == 0 and leases.counts.peak <= 6 * SIZE


def test_leases_of_the_dead_go_to_others_first_and_nothing_is_doubled() -> None:
    leases, order, deaths = lend(30), [], {3, 4, 11}

    def work(lease: Lease) -> int:
        order.append(lease.number)
        if lease.number in deaths:
            deaths.discard(lease.number)
            raise Gone
        return lease.number

    start(leases, work)
    assert taken(leases) == [f"p{n}" for n in range(30)]
    assert order[3:6] == [3, 3, 4] and len(order) == 33


def test_the_last_lease_is_waited_for_by_those_who_have_nothing_to_do() -> None:
    """It may come back: its producer dies while the other one has found nothing left."""
    leases, began = lend(2), threading.Event()

    def dies(lease: Lease) -> int:
        began.set()
        time.sleep(0.05)
        raise Gone

    first = leases.next()
    assert first is not None
    threading.Thread(target=lambda: (time.sleep(0.1), leases.lost(first)), daemon=True).start()
    start(leases, lambda lease: lease.number)
    assert taken(leases) == ["p0", "p1"]


def test_a_row_that_fails_every_time_is_bad_and_the_others_come() -> None:
    leases, tries = lend(5, tries=3), []

    def work(lease: Lease) -> int:
        if lease.number == 2:
            tries.append(1)
            raise RuntimeError("first\nno such state")
        return lease.number

    start(leases, work)
    found = [leases.take() for _ in range(5)]
    failed = from_wire(found[2][1][0])
    assert isinstance(failed, Failed) and failed.why == "p2: failed 3 times; the last: no such state" and len(tries) == 3
    assert [one[1] for place, one in enumerate(found) if place != 2] == [0, 1, 3, 4]


def test_s4_a_stop_is_told_to_who_takes_and_to_who_lends() -> None:
    leases = lend(100)

    def work(lease: Lease) -> int:
        if lease.number == 5:
            raise Final("producer-0 died: exit code 9")
        return lease.number

    thread = start(leases, work)
    with pytest.raises(ValueError, match="producer-0 died: exit code 9"):
        taken(leases)
    thread.join(5)
    assert not thread.is_alive() and leases.next() is None


def test_one_lease_larger_than_the_bound_is_admitted_alone() -> None:
    leases = lend(4, bound=1)
    start(leases, lambda lease: lease.number)
    assert taken(leases) == ["p0", "p1", "p2", "p3"]


def test_closing_ends_the_threads() -> None:
    leases = lend(1000, bound=3 * SIZE)
    threads = [start(leases, lambda lease: lease.number) for _ in range(3)]
    assert leases.take() is not None
    leases.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
