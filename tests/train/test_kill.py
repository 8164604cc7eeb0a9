"""The process is killed in the middle of training, twice; what it ends with is what the uninterrupted run ends with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import specgraft
from specgraft.log import read_metrics
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.train.checkpoint import checkpoints
from specgraft.train.told import MEASURED

STEPS = 100
OVERRIDES = [f"train.steps={STEPS}", "train.checkpoint_every=5", "train.validate_every=40", "train.lr=3e-3"]
PATIENCE = 300.0  # seconds; only a failing test waits that long


def kill_behind(step: int, run_file: Path, root: Path) -> int:
    """Starts `specgraft train`, kills it with SIGKILL when a checkpoint behind `step` is there; returns that one's step."""
    environment = {**os.environ, "PYTHONPATH": str(Path(specgraft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specgraft.cli", "train", str(run_file), *OVERRIDES]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end = time.monotonic() + PATIENCE
    try:
        while not (found := [path for path in checkpoints(root) if int(path.name[5:]) > step]):
            assert child.poll() is None and time.monotonic() < end, child.communicate()[1].decode()
            time.sleep(0.002)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    return int(found[-1].name[5:])


def rows_of(root: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in read_metrics(root / "metrics.jsonl")]


def test_a_run_killed_twice_ends_as_the_uninterrupted_one(make_run_file: Callable[[Path], Path], captured_twice: Any, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run_file = make_run_file(tmp_path)
    work, whole = captured_twice(run_file, OVERRIDES)
    root = work.run.root
    first = kill_behind(0, run_file, root / "checkpoints")
    second = kill_behind(first + 10, run_file, root / "checkpoints")
    assert 0 < first < second < STEPS
    assert max(row["step"] for row in rows_of(root)) < STEPS
    try:
        work.train()
        Session(load_config(run_file, [*OVERRIDES, "run.name=whole"])).train()
    finally:
        torch.set_num_threads(threads)
    rows = rows_of(root)
    assert rows == rows_of(whole) and rows[-1]["step"] == STEPS
    ends = [checkpoints(folder / "checkpoints") for folder in (root, whole)]
    assert [path.name for path in ends[0]] == [path.name for path in ends[1]] == ["step-000095", "step-000100"]
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        killed, straight = (load_file(paths[-1] / name) for paths in ends)
        assert killed.keys() == straight.keys() and all(torch.equal(killed[key], straight[key]) for key in killed)
    assert not list((root / "checkpoints").glob(".*"))
