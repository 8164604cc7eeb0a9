"""Numbers of a benchmark cell, worked by hand."""

from __future__ import annotations

import pytest

from specgraft.bench.load import Answered
from specgraft.bench.summary import (
    accept_length,
    cell_summary,
    compared,
    passes,
    percentile,
    predicted_speedup,
    same_text,
    step_seconds,
)
from specgraft.engines.counters import Counters


def answered(tokens: int, total: float, first: float = 0.5, suite: str = "a", name: str = "1", repeat: int = 0, accepted=None, steps=None):
    return Answered(suite, name, repeat, list(range(tokens)), "length", first, total, [0.1, 0.3], accepted, None, steps)


def test_passes_are_counted_behind_the_prefill_token():
    assert passes(answered(10, 1.0)) is None
    assert passes(answered(10, 1.0, accepted=5)) == 4  # 9 tokens behind the first: 5 accepted drafts and 4 bonus tokens
    assert passes(answered(10, 1.0, accepted=5, steps=3)) == 3
    assert passes(answered(1, 1.0, accepted=0)) == 0


def test_b2_request_mean_and_pooled_are_both_shown():
    """faults.md B2: 10 rounds of 40 tokens and 90 rounds of 180 tokens: pooled 2.2, request mean 3.0."""
    rows = [answered(41, 1.0, steps=10, accepted=30), answered(181, 1.0, name="2", steps=90, accepted=90)]
    mean, pooled, suites = accept_length(rows)
    assert (mean, pooled) == (pytest.approx(3.0), pytest.approx(2.2)) and suites == {"a": pytest.approx(3.0)}


def test_suites_weigh_equally():
    rows = [answered(5, 1.0, steps=4), answered(5, 1.0, name="2", steps=4), answered(9, 1.0, suite="b", steps=2)]
    mean, pooled, suites = accept_length(rows)
    assert suites == {"a": 1.0, "b": 4.0} and mean == 2.5 and pooled == pytest.approx(16 / 10)
    assert accept_length([answered(5, 1.0)]) == (None, None, {})


def test_a_step_is_decode_time_over_passes():
    assert step_seconds([answered(5, 2.5)]) == pytest.approx(0.5)  # plain: 2 s for 4 tokens
    assert step_seconds([answered(5, 2.5, steps=2)]) == pytest.approx(1.0)
    assert step_seconds([answered(1, 2.5)]) is None


def test_percentiles_by_nearest_rank():
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([3, 1, 2], 0.95) == 3 and percentile([], 0.5) is None


def test_a_cell_and_its_comparison():
    """B4 of faults.md: decoding 10 ms a token, a step of 16 ms, length 1.5: 0.94 of plain."""
    plain = cell_summary([answered(101, 1.5)] * 2, [3.0], None)
    assert plain["tokens_per_second"] == pytest.approx(202 / 3.0) and plain["accept_length"] is None
    assert plain["step_ms"] == pytest.approx(10.0)
    counters = Counters(100, 700, 50, (30, 15, 5))
    spec = cell_summary([answered(151, 2.1, accepted=50)], [2.1], counters)
    assert spec["accept_length"] == pytest.approx(1.5) and spec["accept_length_pooled"] == 1.5
    assert spec["survival"] == [0.3, 0.15, 0.05] and spec["step_ms"] == pytest.approx(16.0)
    both = compared(spec, plain)
    assert both["break_even"] == pytest.approx(1.6) and 1.5 / both["break_even"] == pytest.approx(0.9375)
    assert both["speedup"] == pytest.approx((151 / 2.1) / (202 / 3.0))


def test_the_model_is_fitted_on_the_first_repeat_and_held_against_the_others():
    """Prefill 0.5 s; plain 10 ms a token; a step of 20 ms commits 2 tokens in the fit, the test's steps are 10 % longer."""
    plain = [answered(101, 0.5 + 1.0, repeat=number) for number in (0, 1)]
    spec = [answered(101, 0.5 + 50 * 0.020, repeat=0, accepted=50), answered(101, 0.5 + 50 * 0.022, repeat=1, accepted=50)]
    found = predicted_speedup(spec, plain)
    assert found is not None and found["model"] == pytest.approx(1.0) and found["measured"] == pytest.approx(1.5 / 1.6)
    assert found["difference"] == pytest.approx(1.6 / 1.5 - 1)
    assert predicted_speedup(spec[:1], plain[:1]) is None
    luckier = [spec[0], answered(101, 0.5 + 25 * 0.020, repeat=1, accepted=75)]  # the accept length reached is the model's input
    assert (again := predicted_speedup(luckier, plain)) is not None and again["difference"] == pytest.approx(0)


def test_texts_that_part_are_named_with_their_place():
    other = Answered("a", "1", 0, [0, 1, 7], "length", 0.1, 1.0)
    rows = same_text([other, answered(3, 1.0, name="2")], [answered(3, 1.0), answered(3, 1.0, name="2")])
    assert rows == [{"suite": "a", "id": "1", "place": 2, "before": [0, 1], "plain": [2], "drafter": [7]}]
    shorter = Answered("a", "1", 0, [0, 1], "length", 0.1, 1.0)
    assert same_text([shorter], [answered(3, 1.0)])[0]["place"] == 2
