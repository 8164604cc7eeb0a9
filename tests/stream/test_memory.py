"""The queue between a producer thread and the trainer: order, bound, errors, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specgraft.stream.memory import MemoryStream

PATIENCE = 20.0  # seconds; only a failing test waits that long


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Source:
    """Counts what was taken from it."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error, self.taken = count, error, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.taken = number + 1
            yield number
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("bound", [1, 3, 100])
def test_items_arrive_once_and_in_order(bound: int) -> None:
    with MemoryStream(range(50), bound) as stream:
        assert list(stream) == list(range(50))


def test_an_empty_source_ends_at_once() -> None:
    with MemoryStream([]) as stream:
        assert list(stream) == []


def test_the_producer_is_never_further_ahead_than_the_bound() -> None:
    source = Source(40)
    with MemoryStream(source, bound=3) as stream:
        until(lambda: source.taken == 4)  # three in the queue and one in the producer's hand
        time.sleep(0.25)
        assert source.taken == 4
        for number, item in enumerate(stream):
            assert item == number and source.taken <= number + 1 + 4
    assert source.taken == 40


def test_an_error_of_the_producer_is_raised_at_the_consumer_behind_the_good_items() -> None:
    seen = []
    with (
        MemoryStream(Source(3, ValueError("shard 7 is damaged")), bound=1) as stream,
        pytest.raises(ValueError, match="shard 7 is damaged"),
    ):
        for item in stream:
            seen.append(item)
    assert seen == [0, 1, 2]


def test_closing_ends_a_producer_that_is_blocked_on_a_full_queue() -> None:
    before = threading.active_count()
    source = Source(1_000)
    stream = MemoryStream(source, bound=2)
    until(lambda: source.taken == 3)
    began = time.monotonic()
    stream.close()
    until(lambda: threading.active_count() == before)
    assert time.monotonic() - began < 10
    assert source.taken == 3


def test_an_error_of_the_consumer_stops_the_producer() -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="consumer"), MemoryStream(Source(1_000), bound=2) as stream:
        for item in stream:
            if item == 5:
                raise RuntimeError("consumer")
    until(lambda: threading.active_count() == before)
