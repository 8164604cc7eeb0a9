"""Which rows share a pass, and which share a shard."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from specgraft.capture.batches import MOST_PADDING, by_length, in_order, padded_tokens, shards_of
from specgraft.capture.forward import resolve_taps, spread_taps


@pytest.mark.parametrize("limit", [1, 16, 64, 10_000])
def test_batches_hold_every_row_once_within_the_padded_limit(limit: int) -> None:
    generator = random.Random(limit)
    lengths = [generator.randint(1, 40) for _ in range(50)]
    batches = list(by_length(lengths, limit))
    assert sorted(index for batch in batches for index in batch) == list(range(50))
    for batch in batches:
        padded = max(lengths[index] for index in batch) * len(batch)
        assert padded <= limit or len(batch) == 1
    longest = [lengths[index] for batch in batches for index in batch]
    assert longest == sorted(longest, reverse=True)  # rows of like length meet
    for batch, behind in pairwise(batches):  # no batch is cut early
        longer = [*batch, behind[0]]
        padded = padded_tokens(lengths, longer)
        assert padded > limit or padded - sum(lengths[index] for index in longer) > MOST_PADDING * padded


def test_padding_of_a_batch_stays_within_its_share() -> None:
    generator = random.Random(0)
    lengths = [int(generator.lognormvariate(5, 0.8)) + 2 for _ in range(400)]
    for batch in by_length(lengths, 4096):
        assert sum(lengths[index] for index in batch) >= (1 - MOST_PADDING) * padded_tokens(lengths, batch)


def test_rows_of_equal_length_keep_their_order() -> None:
    assert list(by_length([5, 5, 5, 5], 10)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("limit", [1, 30, 100, 10_000])
def test_shards_keep_the_order_and_the_limit(limit: int) -> None:
    generator = random.Random(limit)
    lengths = [generator.randint(1, 40) for _ in range(50)]
    shards = list(in_order(lengths, limit))
    assert [index for shard in shards for index in shard] == list(range(50))
    assert all(sum(lengths[index] for index in shard) <= limit or len(shard) == 1 for shard in shards)


def test_nothing_makes_no_batch_and_no_shard() -> None:
    assert list(by_length([], 8)) == list(in_order([], 8)) == list(shards_of([], set(), 8, 8)) == []


def test_rows_are_put_together_by_length_over_many_shards() -> None:
    generator = random.Random(1)
    lengths = [generator.randint(5, 400) for _ in range(2_000)]
    shards = list(shards_of(lengths, range(2_000), 4096, 16_384))
    flat = [index for shard in shards for batch in shard for index in batch]
    assert sorted(flat) == list(range(2_000))
    assert all(sum(lengths[index] for batch in shard for index in batch) <= 16_384 for shard in shards)
    padded = sum(padded_tokens(lengths, batch) for shard in shards for batch in shard)
    assert 1 - sum(lengths) / padded < 0.03
    alone = [batch for part in in_order(lengths, 16_384) for batch in by_length([lengths[i] for i in part], 4096, 1.0)]
    assert len(alone) < 2 * sum(map(len, shards))  # not at the price of many more passes


def test_a_window_that_is_broken_off_goes_on_with_the_same_batches() -> None:
    generator = random.Random(2)
    lengths = [generator.randint(2, 60) for _ in range(300)]
    whole = list(shards_of(lengths, range(300), 200, 400))
    for stop in (1, 7, len(whole) - 1):
        done = {index for shard in whole[:stop] for batch in shard for index in batch}
        assert list(shards_of(lengths, set(range(300)) - done, 200, 400)) == whole[stop:]


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
