"""The comparison of continuations: its figures on hand-made rows, and what it says of bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import onpolicy

    return onpolicy


def row(per_request: list[float | None], steps: int = 4) -> dict[str, Any]:
    part = {"per_request": per_request, "accept_length": 1.5, "survival": [0.5, 0.25]}
    now = {"steps": steps, "slots": 100.0, "seconds": 2.0, "t0": part, "t1": part, "expected": part}
    return {"reached": {"slots": now, "seconds": now}}


def test_prompts_are_paired_and_seeds_of_one_are_one_observation(script: Any) -> None:
    assert script.values([row([1.0, 3.0, None]), row([2.0, 5.0, 4.0])], "slots", "expected").tolist() == [1.5, 4.0]


def test_an_interval_holds_the_mean_and_shrinks_to_it_where_nothing_differs(script: Any) -> None:
    mean, low, high = script.interval(np.array([1.0, 2.0, 3.0, 6.0]))
    assert mean == 3.0 and 1.0 <= low < 3.0 < high <= 6.0
    assert script.interval(np.full(5, 2.5)) == (2.5, 2.5, 2.5)


def test_a_change_is_against_the_method_named(script: Any) -> None:
    start = {name: {"accept_length": 1.25, "survival": [0.5, 0.25]} for name in ("t0", "t1", "expected")}
    text = script.table("dspark", start, {"ce": [row([1.0, 2.0])], "specopd": [row([1.1, 2.2], steps=7)]}, "ce")
    line = next(line for line in text.splitlines() if line.startswith("| specopd"))
    assert "| 7 | 100 | 2 |" in line and line.count("+10.00 %") == 3 and "0.500 0.250" in line


@pytest.mark.parametrize("name", ["onpolicy", "opd_throughput", "drafters"])
def test_a_run_file_that_is_not_there_is_one_line(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "/nowhere.toml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"{name}.py: error: /nowhere.toml: no such run file")
