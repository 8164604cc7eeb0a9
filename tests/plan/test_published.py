"""Every row of the worked example (algorithms 6.3)."""

from __future__ import annotations

import pytest

from specgraft.plan.published import TOLERANCE, Published, published_table

ROWS = {row.key: row for row in published_table()}

# key, model value, tolerance, published, status
EXPECTED: list[tuple[str, float | None, float, float | None, str]] = [
    ("speed_before", 421.43, 0.01, 425.8, "reproduced"),
    ("speedup_before", 1.408, 0.001, 1.422, "reproduced"),
    ("speed_after", 474.53, 0.01, 472.8, "reproduced"),
    ("speedup_after", 1.585, 0.001, 1.579, "reproduced"),
    ("pilot_high", 217.86, 0.01, 218.0, "reproduced"),
    ("pilot_low", 217.86, 0.01, 196.0, "not reproduced"),
    ("pilot_speedup", 0.728, 0.001, None, "prediction only"),
    ("final_over_start", 3.637, 0.001, 3.64, "reproduced"),
    ("break_even_low", 2.515, 0.001, 2.5, "reproduced"),
    ("break_even_high", 2.515, 0.001, 3.0, "not reproduced"),
    ("break_even_after", 2.234, 0.001, None, "prediction only"),
    ("implied_step_before", 8.314, 0.001, 8.4, "reproduced"),
    ("implied_step_after", 7.487, 0.001, 7.46, "reproduced"),
    ("fixed_cost", 1.53, 0.001, 0.94, "inconsistent"),
    ("start", None, 0, 130.0, "not derivable"),
    ("middle_before", 276.2, 0.05, None, "prediction only"),
    ("middle_after", 311.0, 0.05, None, "prediction only"),
    ("trainer", 1.853, 0.0005, 1.83, "comparison"),
    ("alpha_final", 0.744, 0.0005, None, "prediction only"),
    ("accept_length_final", 2.71, 0.005, None, "prediction only"),
    ("alpha_middle", 0.642, 0.0005, None, "prediction only"),
    ("accept_length_middle", 2.71, 0.006, None, "prediction only"),
]


def test_the_table_has_exactly_these_rows() -> None:
    assert list(ROWS) == [key for key, *_ in EXPECTED]


@pytest.mark.parametrize(("key", "model", "tolerance", "published", "status"), EXPECTED)
def test_row(key: str, model: float | None, tolerance: float, published: float | None, status: str) -> None:
    row = ROWS[key]
    assert row.status == status
    assert row.model == (None if model is None else pytest.approx(model, abs=tolerance))
    assert row.published == (None if published is None else pytest.approx(published, abs=0.0006))


@pytest.mark.parametrize("row", [row for row in ROWS.values() if "reproduced" in row.status], ids=lambda row: row.key)
def test_reproduced_means_within_two_percent(row: Published) -> None:
    assert row.error is not None
    assert (abs(row.error) <= TOLERANCE == 0.02) == (row.status == "reproduced")


@pytest.mark.parametrize(
    ("key", "percent"),
    [
        ("speed_before", -1.03),
        ("speed_after", 0.37),
        ("pilot_high", -0.07),
        ("pilot_low", 11.15),
        ("trainer", 1.26),
        ("implied_step_before", -1.03),
        ("implied_step_after", 0.37),
    ],
)
def test_errors(key: str, percent: float) -> None:
    error = ROWS[key].error
    assert error is not None
    assert 100 * error == pytest.approx(percent, abs=0.006)


def test_what_would_be_needed() -> None:
    assert "9.34 ms" in ROWS["pilot_low"].note
    assert "10.02 ms" in ROWS["break_even_high"].note
    assert "accept 1.09" in ROWS["start"].note and "14.1 ms" in ROWS["start"].note
    assert "0.87 -> 1.46 ms" in ROWS["fixed_cost"].note and "0.124 -> 0.209" in ROWS["fixed_cost"].note
    assert "3.275" in ROWS["final_over_start"].note
    assert "0.92x" in ROWS["middle_before"].note and "1.04x" in ROWS["middle_after"].note
    assert "+2.8%" in ROWS["trainer"].note
