"""kill -9 of the trainer and of Ray's node process in a run with Ray producers: it ends as the undisturbed run, step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specgraft.run import Session
from specgraft.run_file import load_config

pytestmark = pytest.mark.ray
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "stream_kills.py"


def test_a_run_whose_trainer_and_node_are_killed_ends_as_the_undisturbed_one(
    ray_cluster: None, make_run_file: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Slow, as a cluster is started anew behind every kill: half a minute on two quiet CPUs. Twenty kills: the benchmark."""
    run_file = make_run_file(tmp_path)
    Session(load_config(run_file)).regen()
    more = ["stream.medium=ray", "stream.bound_mb=0.02", "stream.retries=9", "train.rows=2", "train.anchors=2", "train.steps=100"]
    loop = ["train.checkpoint_every=10", "train.validate_every=100"]
    command = [sys.executable, str(BENCHMARK), str(run_file), *more, *loop, "--kills", "2", "--kinds", "trainer", "node", "--whole-medium", "memory", "--within", "0.4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights_and_optimiser_identical"] and found["every_step_once_with_its_loss"], found
    assert found["kills"] == {"trainer": 1, "node": 1} and found["longest_seconds_to_end"] < 120
    assert found["starts"] in (2, 3)  # actors outlive their node for a moment: a run this short may end before they notice
