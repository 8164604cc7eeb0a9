"""The command under torchrun: a rank that is killed ends the run, and the same command goes on to what an undisturbed run ends with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specgraft
from specgraft.log import read_metrics
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.train.checkpoint import checkpoints

OVERRIDES = ["train.steps=24", "train.checkpoint_every=4", "train.validate_every=24", "train.accumulate=2", "train.timeout=60"]
PATIENCE = 300.0  # seconds; only a failing test waits that long


def torchrun(run_file: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(specgraft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "specgraft", "train", str(run_file)]
    return subprocess.Popen([*command, *OVERRIDES, *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            facts = dict(entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry)
        except (OSError, ValueError, IndexError):
            continue
        if parent == agent and "RANK" in facts:
            found[int(facts["RANK"])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(make_run_file: Callable[[Path], Path], captured_twice: Any, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run_file = make_run_file(tmp_path)
    work, whole = captured_twice(run_file, OVERRIDES)
    root = work.run.root
    child, end = torchrun(run_file), time.monotonic() + PATIENCE
    while not checkpoints(root / "checkpoints"):
        assert child.poll() is None and time.monotonic() < end, child.communicate()[0].decode()
        time.sleep(0.01)
    os.kill(ranks_of(child.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    said = child.communicate(timeout=PATIENCE)[0].decode()
    assert child.returncode != 0 and time.monotonic() - killed < 60, said
    assert 0 < int(checkpoints(root / "checkpoints")[-1].name[5:]) < 24
    again = torchrun(run_file)
    said = again.communicate(timeout=PATIENCE)[0].decode()
    assert again.returncode == 0, said
    assert said.count("checkpoint: ") == 1 and "step-000024" in said  # rank 0 speaks
    try:
        Session(load_config(run_file, [*OVERRIDES, "run.name=whole"])).train()
    finally:
        torch.set_num_threads(threads)
    rows, others = ([row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"] for folder in (root, whole))
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a child with its parent")
def test_ranks_do_not_outlive_a_killed_torchrun(make_run_file: Callable[[Path], Path], captured_twice: Any, tmp_path: Path) -> None:
    """They would train on beside those of the next attempt, into the same run."""
    run_file = make_run_file(tmp_path)
    work, _ = captured_twice(run_file, OVERRIDES)
    child, end = torchrun(run_file, "train.steps=5000", "train.checkpoint_every=5000"), time.monotonic() + PATIENCE
    while not work.run.metrics.exists() or not read_metrics(work.run.metrics):
        assert child.poll() is None and time.monotonic() < end, child.communicate()[0].decode()
        time.sleep(0.05)
    ranks = ranks_of(child.pid)
    child.kill()
    child.communicate(timeout=60)
    while any(Path(f"/proc/{pid}/exe").exists() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)
    before = len(read_metrics(work.run.metrics))
    assert len(ranks) == 2 and 0 < before < 5000
