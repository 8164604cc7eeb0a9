"""A run that learns from its own draft-verify rounds: resumed bit for bit, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from specgraft.distill import draft_opd as module
from specgraft.log import read_metrics

ROLLOUTS: dict[str, Any] = {"preset": "draft_opd"}


def test_six_steps_equal_three_and_three(broken_off) -> None:
    broken_off(module, "draft_opd", distill=ROLLOUTS)


def test_what_a_step_reports(ready) -> None:
    run = ready()
    run.train(distill=ROLLOUTS)
    rows = [row for row in read_metrics(run.run.metrics) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        parts = [row[f"{name}_seconds"] for name in ("sample", "score", "learn")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["seconds"], rel=1e-6)
        assert row["branch_accept_length"] == pytest.approx(1 + sum(row["accepted"])) and 1 <= row["branch_accept_length"] <= 4
        assert row["slots"] > 0 and "ce" not in row and min(row["kl"], row["rkl"], row["confidence"]) > 0
