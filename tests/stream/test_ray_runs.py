"""Whole runs with the target in an actor: the numbers of the run that has it in process, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specgraft.log import read_metrics
from specgraft.run import Session
from specgraft.run_dir import read_json
from specgraft.run_file import load_config
from specgraft.train.checkpoint import checkpoints

pytestmark = pytest.mark.ray
RAY = ["stream.medium=ray", "stream.cpus=0.4", "stream.start_timeout=900", "stream.bound_mb=1"]
PLAIN = ["train.rows=2", "train.anchors=2", "train.validate_every=25"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, make_run_file: Callable[[Path], Path]) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ray")
    run_file = make_run_file(folder)
    threads = torch.get_num_threads()
    work = Session(load_config(run_file))
    work.regen()
    torch.set_num_threads(threads)
    return run_file, work.run.root


def trained(answered: tuple[Path, Path], name: str, overrides: list[str]) -> tuple[list[Any], dict[str, torch.Tensor], Session]:
    run_file, root = answered
    shutil.copytree(root, root.with_name(name), dirs_exist_ok=True)
    threads = torch.get_num_threads()
    work = Session(load_config(run_file, [f"run.name={name}", *overrides]))
    try:
        work.train()
    finally:
        torch.set_num_threads(threads)
    keys = ("step", "loss", "grad_norm", "alpha", "survival")
    rows = [[row.get(key) for key in keys] for row in read_metrics(work.run.metrics)]
    return rows, load_file(checkpoints(work.run.checkpoints)[-1] / "drafter.safetensors"), work


def assert_same(left: Any, right: Any) -> None:
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys() and all(torch.equal(left[1][name], right[1][name]) for name in left[1])


def test_fifty_steps_with_the_target_in_an_actor_have_the_losses_of_memory(ray_cluster: None, answered: Any) -> None:
    more = [*PLAIN, "train.steps=50", "train.checkpoint_every=50"]
    mine = trained(answered, "memory", [*more, "stream.medium=memory"])
    there = trained(answered, "ray", [*more, *RAY, "stream.keep=true"])
    assert len(mine[0]) == 52
    assert_same(mine, there)
    assert "target" not in there[2].__dict__  # the trainer never loaded it
    gates = [gate["name"] for gate in read_json(there[2].run.gates)["gates"]]
    assert {"token identity", "tap identity", "distribution identity"} <= set(gates)
    again = trained(answered, "disk", [*more, "stream.medium=disk"]) if shutil.copytree(
        there[2].run.features, there[2].run.root.with_name("disk") / "features"
    ) else None
    assert_same(mine, again)  # what was kept is what capture would have written


@pytest.mark.parametrize("staleness", [0, 2])
def test_branches_scored_by_actors_give_the_losses_of_the_target_in_process(ray_cluster: None, answered: Any, staleness: int) -> None:
    more = [*PLAIN, "train.steps=6", "train.checkpoint_every=6", "distill.preset=specopd", "capture.batch_tokens=1", f"stream.staleness={staleness}"]
    mine = trained(answered, f"opd-memory{staleness}", [*more, "stream.medium=memory"])
    there = trained(answered, f"opd-ray{staleness}", [*more, *RAY, "stream.producers=2"])
    assert_same(mine, there)
    assert "target" not in there[2].__dict__
