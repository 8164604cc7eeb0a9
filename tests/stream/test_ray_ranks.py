"""Two ranks that share one cluster by address, under torchrun and as workers of Ray Train: the numbers of torchrun on memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import specgraft
from specgraft.config import StreamSection
from specgraft.log import read_metrics, say
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.stream import cluster
from specgraft.train.checkpoint import checkpoints
from specgraft.train.parallel import ray_train
from specgraft.train.parallel.stop import FILE, Stop

PLAIN = ["train.rows=2", "train.anchors=2", "train.steps=6", "train.checkpoint_every=3", "train.validate_every=6", "train.timeout=120"]
RAY = ["stream.medium=ray", "stream.producers=2", "stream.cpus=0.4", "stream.bound_mb=1"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, make_run_file: Callable[[Path], Path]) -> Path:
    run_file = make_run_file(tmp_path_factory.mktemp("ranks"))
    threads = torch.get_num_threads()
    Session(load_config(run_file)).regen()
    torch.set_num_threads(threads)
    return run_file


@pytest.fixture(scope="module")
def in_memory(answered: Path) -> Path:
    """What two ranks of torchrun make with features of their own."""
    return trained(answered, "memory", TORCHRUN, ["stream.medium=memory"])


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "specgraft", "train"]


def trained(run_file: Path, name: str, start: list[str], more: list[str]) -> Path:


    root = run_file.parent / "runs"
    shutil.copytree(root / "pilot", root / name)
    environment = {**os.environ, "PYTHONPATH": str(Path(specgraft.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *start, str(run_file), f"run.name={name}", *PLAIN, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("checkpoint: ") == 1
    return root / name


def assert_same(left: Path, right: Path) -> None:
    rows = [[(row["step"], row["kind"], row.get("loss")) for row in read_metrics(root / "metrics.jsonl")] for root in (left, right)]
    assert rows[0] == rows[1] and len(rows[0]) == 7
    ends = [load_file(checkpoints(root / "checkpoints")[-1] / "drafter.safetensors") for root in (left, right)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.ray
def test_ranks_of_torchrun_share_the_actors_of_a_cluster_by_address(ray_cluster: None, answered: Path, in_memory: Path) -> None:
    module = cluster.ray()
    address = module.get_runtime_context().gcs_address
    assert_same(in_memory, trained(answered, "shared", TORCHRUN, [*RAY, f"stream.address={address}"]))
    assert not module.util.list_named_actors(all_namespaces=True)  # they ended with the run


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs Ray Train: pip install 'specgraft[ray-train]'")
def test_workers_of_ray_train_are_ranks_like_those_of_torchrun(answered: Path, in_memory: Path) -> None:
    assert_same(in_memory, trained(answered, "workers", ["specgraft", "train", "--ray-workers", "2"], RAY))
    assert not (answered.parent / "runs" / "workers" / ".ray-train").exists()


def test_an_address_where_nobody_answers_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"stream\.address='127\.0\.0\.1:1': nothing answers there"):
        cluster.connect(StreamSection(medium="ray", address="127.0.0.1:1"))


def test_without_ray_train_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ValueError, match=r'pip install "specgraft\[ray-train\]"'):
        ray_train.modules()


def test_a_worker_is_asked_to_stop_by_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "stop"))
    stop = Stop()
    assert not stop.asked
    with ray_train.noted(tmp_path / "stop"):
        os.kill(os.getpid(), 15)
    assert stop.asked


def test_what_ends_a_worker_travels_as_its_line_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def raises(error: BaseException) -> Callable[[], None]:
        def call() -> None:
            raise error

        return call

    refused = ray_train.Refused("a shard is damaged", 3)
    assert ray_train.told(str(tmp_path), tmp_path / "said", raises(refused)) == ("refused", "a shard is damaged", 3)
    assert ray_train.told(str(tmp_path), tmp_path / "said", raises(SystemExit(0))) == ("exit", None, 0)
    assert ray_train.told(str(tmp_path), tmp_path / "said", lambda: say("seen")) == ("done", None, 0)
    assert (tmp_path / "said").read_text() == "seen\n"
    say("here again")
    assert capsys.readouterr().err == "here again\n"


def test_of_several_failed_workers_the_cause_is_told() -> None:
    error = Exception("x")
    error.worker_failures = {0: ValueError("train: rank 0 has lost the others (gone)"), 1: ValueError("p3: damaged\n")}  # type: ignore[attr-defined]
    assert ray_train.why(error) == "rank 1: p3: damaged"


def test_workers_without_room_are_told_in_a_short_line() -> None:
    error = Exception("x")
    error.controller_failure = RuntimeError("The startup timed out after 10.0 seconds waiting for 3 workers. Potential causes include: (1) none")  # type: ignore[attr-defined]
    assert ray_train.why(error) == "The startup timed out after 10.0 seconds waiting for 3 workers"
