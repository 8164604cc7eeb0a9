"""Which rows share a pass, and which share a shard."""

from __future__ import annotations

import random

import pytest

from specgraft.capture.batches import by_length, into_shards
from specgraft.capture.forward import resolve_taps, spread_taps


@pytest.mark.parametrize("limit", [1, 16, 64, 10_000])
def test_batches_hold_every_row_once_within_the_padded_limit(limit: int) -> None:
    lengths = [random.Random(limit).randint(1, 40) for _ in range(50)]
    batches = list(by_length(lengths, limit))
    assert sorted(index for batch in batches for index in batch) == list(range(50))
    for batch in batches:
        padded = max(lengths[index] for index in batch) * len(batch)
        assert padded <= limit or len(batch) == 1
    longest = [lengths[index] for batch in batches for index in batch]
    assert longest == sorted(longest, reverse=True)  # rows of like length meet
    for batch in batches[:-1]:
        assert lengths[batch[0]] * (len(batch) + 1) > limit  # no batch is cut early


def test_rows_of_equal_length_keep_their_order() -> None:
    assert list(by_length([5, 5, 5, 5], 10)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("limit", [1, 30, 100, 10_000])
def test_shards_keep_the_order_and_the_limit(limit: int) -> None:
    lengths = [random.Random(limit).randint(1, 40) for _ in range(50)]
    shards = list(into_shards(lengths, limit))
    assert [index for shard in shards for index in shard] == list(range(50))
    assert all(sum(lengths[index] for index in shard) <= limit or len(shard) == 1 for shard in shards)


def test_nothing_makes_no_batch_and_no_shard() -> None:
    assert list(by_length([], 8)) == list(into_shards([], 8)) == []


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 1, [18]),
        (5, 2, [1, 2]),
    ],
)
def test_spread_taps_follow_the_published_rule(layers: int, count: int, expected: list[int]) -> None:
    assert spread_taps(layers, count) == expected


@pytest.mark.parametrize(("layers", "count", "fit"), [(4, 3, 1), (4, 2, 1), (3, 2, 1), (6, 4, 3), (8, 9, 5), (2, 3, 1)])
def test_spread_taps_that_would_collide_are_refused_naming_how_many_fit(layers: int, count: int, fit: int) -> None:
    with pytest.raises(ValueError, match=rf"capture\.tap_count={count}: a target of {layers} layers has room for {fit} spread"):
        spread_taps(layers, count)


def test_named_taps_are_kept_as_named_the_last_layer_included() -> None:
    assert resolve_taps([0, 3], 5, 4) == [0, 3]
    assert resolve_taps("spread", 5, 36) == spread_taps(36, 5)


@pytest.mark.parametrize(
    ("taps", "why"),
    [([], "empty"), ([1, 1], "once"), ([2, 1], "rising"), ([0, 4], "0 to 3"), ([-1, 2], "0 to 3")],
)
def test_taps_that_are_absent_repeated_or_unsorted_are_refused(taps: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve_taps(taps, 5, 4)
