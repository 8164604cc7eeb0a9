"""A run that learns from its own draft-verify rounds: resumed bit for bit, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specgraft.distill import draft_opd as module
from specgraft.log import read_metrics
from specgraft.train.checkpoint import checkpoints

ROLLOUTS: dict[str, Any] = {"preset": "draft_opd"}


def test_six_steps_equal_three_and_three(ready, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, stopped = ready("straight"), ready("stopped")
    straight.train(distill=ROLLOUTS)
    real, calls = module.draft_opd, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "draft_opd", stop)
        stopped.train(distill=ROLLOUTS)
    assert [path.name for path in checkpoints(stopped.run.checkpoints)] == ["step-000003"]
    stopped.train(distill=ROLLOUTS)
    for a, b in zip(checkpoints(straight.run.checkpoints), checkpoints(stopped.run.checkpoints), strict=True):
        left, right = load_file(a / "drafter.safetensors"), load_file(b / "drafter.safetensors")
        assert set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left), a.name


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
