"""The cost model against numbers worked by hand, and its error lines."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from specgraft.plan import breakeven as cost


def test_hand_worked() -> None:
    # 2 tokens every 10 ms are 200 tokens/s; plain decoding makes 1 token every 4 ms, 250 tokens/s
    assert cost.tokens_per_second(2, 10) == 200
    assert cost.plain_step_ms(250) == 4
    assert cost.speedup(2, 10, 4) == pytest.approx(0.8)
    assert cost.break_even(10, 4) == 2.5
    assert cost.largest_step_ms(2, 4) == 8
    assert cost.implied_step_ms(2, 200) == 10
    assert cost.step_ms(fixed_ms=1, draft_ms=2.5, verify_ms=4) == 7.5


def test_at_break_even_nothing_is_won() -> None:
    assert cost.speedup(cost.break_even(8.4, 3.34), 8.4, 3.34) == pytest.approx(1, abs=1e-12)


def test_accept_length_of_survival() -> None:
    assert cost.accept_length_of_survival([0.8, 0.53]) == pytest.approx(2.33)  # golden value of algorithms 1.4
    assert cost.accept_length_of_survival([1.0] * 7) == 8


def test_iid_is_the_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.744, 0.999):
        closed = (1 - alpha**8) / (1 - alpha)
        assert cost.accept_length_iid(alpha, 7) == pytest.approx(closed, abs=1e-9)
    assert cost.accept_length_iid(1.0, 7) == 8


@pytest.mark.parametrize("draft_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.642, 0.95, 1.0])
def test_fit_finds_alpha_again(alpha: float, draft_tokens: int) -> None:
    fitted = cost.fit_alpha(cost.accept_length_iid(alpha, draft_tokens), draft_tokens)
    assert fitted == pytest.approx(alpha, abs=1e-9)


def test_published_alphas() -> None:
    final, middle = cost.fit_alpha(3.54, 7), cost.fit_alpha(2.32, 3)
    assert (round(final, 3), round(middle, 3)) == (0.744, 0.642)
    assert cost.accept_length_iid(final, 3) == pytest.approx(2.71, abs=0.005)
    assert cost.accept_length_iid(middle, 7) == pytest.approx(2.71, abs=0.006)


def test_best_draft_tokens_by_hand() -> None:
    # 1.6/15.5, 1.95/17, 2.15/18.5, 2.25/20 tokens per ms: the third is largest
    assert cost.best_draft_tokens([0.6, 0.35, 0.2, 0.1], [15.5, 17, 18.5, 20]) == 3
    assert cost.best_draft_tokens([0.5, 0.0], [10, 10]) == 1  # a tie goes to fewer drafts


def test_slot_pays_is_the_sign_of_the_gain() -> None:
    for survival in (0.05, 0.1, 0.2, 0.4):
        for extra in (0.1, 1.0, 3.0):
            faster = (2.0 + survival) / (10 + extra) > 2.0 / 10
            assert cost.slot_pays(survival, extra, accept_length=2.0, step_ms=10) == faster


def test_choices() -> None:
    rows = cost.choices([0.6, 0.35, 0.2, 0.1], step_ms=20, slot_ms=1.5, plain_ms=12)
    assert [row.step_ms for row in rows] == [15.5, 17, 18.5, 20]
    assert [row.best for row in rows] == [False, False, True, False]
    assert [row.slot_pays for row in rows] == [True, True, True, False]
    assert rows[2].tokens_per_second == pytest.approx(2150 / 18.5)
    assert rows[2].speedup == pytest.approx(2.15 * 12 / 18.5)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: cost.break_even(0, 3), "step ms must be a number above 0 (given: 0)"),
        (lambda: cost.break_even(8, -3), "plain ms must be a number above 0 (given: -3)"),
        (lambda: cost.break_even(math.nan, 3), "step ms must be a number above 0 (given: nan)"),
        (lambda: cost.break_even(math.inf, 3), "step ms must be a number above 0 (given: inf)"),
        (lambda: cost.plain_step_ms(0), "plain tokens per second must be a number above 0"),
        (lambda: cost.tokens_per_second(0.9, 8), "accept length counts the bonus token, so it is at least 1"),
        (lambda: cost.tokens_per_second(math.nan, 8), "accept length counts the bonus token"),
        (lambda: cost.tokens_per_second(8.01, 8, 7), "lies in [1, 8], bonus included (given: 8.01)"),
        (lambda: cost.fit_alpha(0.5, 7), "accept length at 7 draft tokens lies in [1, 8]"),
        (lambda: cost.fit_alpha(2, 0), "draft tokens must be at least 1 (given: 0)"),
        (lambda: cost.implied_step_ms(2, -1), "tokens per second must be a number above 0 (given: -1)"),
        (lambda: cost.accept_length_iid(1.2, 7), "alpha must lie in [0, 1] (given: 1.2)"),
        (lambda: cost.accept_length_of_survival([]), "survival needs one number per draft token"),
        (lambda: cost.accept_length_of_survival([0.5, 1.5]), "survival of slot 2 must lie in [0, 1] (given: 1.5)"),
        (lambda: cost.accept_length_of_survival([0.5, 0.6]), "survival must not rise, but slot 2 has 0.6 after 0.5"),
        (lambda: cost.best_draft_tokens([0.5], [1, 2]), "1 survival numbers need as many step times (given: 2)"),
        (lambda: cost.slot_pays(0.5, -1, 2, 8), "slot ms must not be negative (given: -1)"),
        (lambda: cost.choices([0.5, 0.4], 3, 2, 1), "2 draft tokens of 2 ms are longer than the whole step of 3 ms"),
        (lambda: cost.step_ms(-1, 1, 1), "fixed ms must not be negative (given: -1)"),
        (lambda: cost.step_ms(0, 1, 0), "verify ms must be a number above 0 (given: 0)"),
    ],
)
def test_bad_numbers(call: Callable[[], object], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plan_loads_no_torch_and_no_numpy() -> None:
    code = "import sys, specgraft.plan.cli; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
