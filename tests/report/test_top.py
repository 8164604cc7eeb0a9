"""`specgraft top`: the newest numbers of a run in one table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specgraft.report.top import lines, show


def steps(count: int) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "seconds": 0.75, "stall_seconds": 0.25, "tokens": 300,
         "rss_mb": 512.0, "staleness": 0, "device_activity": 0.5 + 0.25 * (step % 2)}
        for step in range(1, count + 1)
    ]  # fmt: skip


def test_rates_are_means_of_the_last_steps_and_the_best_decoded_checkpoint_is_named() -> None:
    """A step is 0.75 s of work and 0.25 s of waiting for 300 tokens; 70 of 100 steps are left."""
    decoded = [{"kind": "decode", "step": step, "accept_length": value} for step, value in ((10, 2.0), (20, 2.5), (30, 2.25))]
    found = dict(lines([*steps(30), *decoded, {"kind": "validate", "step": 30, "accept_length": 1.75}], {"train": {"steps": 100}}))
    assert found["step"] == "30 of 100" and found["left"] == "0:01:10" and found["loss, last 20 steps"] == "2.0000"
    assert found["tokens per second"] == "300" and found["waiting for batches"] == "25.0%" and found["seconds a step"] == "1.000"
    assert found["decoded accept length"] == "2.250 at step 30" and found["best decoded"] == "2.500 at step 20"
    assert found["teacher-forced accept length"] == "1.750 at step 30" and found["memory (MB)"] == "512" and found["device activity"] == "62.5%"


def test_once_prints_the_table_of_a_folder_or_of_a_run_file(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "pilot"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps(3)) + '{"kind": "tr')  # a line that is being written
    (tmp_path / "run.toml").write_text(f'[run]\nroot = "{tmp_path / "runs"}"\n')
    for path in (run, tmp_path / "run.toml"):
        out = io.StringIO()
        show(path, True, 1.0, Console(file=out, width=100))
        assert "tokens per second" in out.getvalue() and "3" in out.getvalue()


def test_a_run_that_has_not_begun_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: not there yet"):
        show(tmp_path, True, 1.0)
    assert lines([], {}) == [("step", "none yet")]
