"""The best checkpoint is the one that decodes best, whatever its loss; it is kept, and found by name (faults.md T7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specgraft.config import TrainSection
from specgraft.drafters.drafter import Drafter
from specgraft.log import read_metrics
from specgraft.run_dir import RunDir
from specgraft.run_file import load_config
from specgraft.train import stage
from specgraft.train.checkpoint import best_of, checkpoints, decoded, named, save
from specgraft.train.decoding import forget, remember
from specgraft.train.optimizer import Optimizer


@pytest.fixture
def drafter(tiny_target, tiny_drafter) -> Drafter:
    return tiny_drafter(tiny_target(), layers=1, rank=8, bigram=0.0).requires_grad_(True)


def steps_of(run: RunDir) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(run.checkpoints)]


def test_the_best_by_decode_length_is_kept_and_named(drafter, tmp_path: Path) -> None:
    """Four checkpoints of decode length 3.00, 3.34, 3.25, 3.18, two of them kept: the second stays too."""
    run, optimizer = RunDir(tmp_path).create(), Optimizer(drafter, TrainSection())
    for step, length in ((10, 3.0), (20, 3.34), (30, 3.25), (40, 3.18)):
        save(run.checkpoints, step, drafter, optimizer, {}, 2)
        remember(run, step, {"accept_length": length})
    assert steps_of(run) == [20, 30, 40]
    best = best_of(run.checkpoints)
    assert best is not None and best.name == "step-000020" == named(run.checkpoints, Path("best")).name
    assert named(run.checkpoints, None).name == named(run.checkpoints, Path("latest")).name == "step-000040"
    assert named(run.checkpoints, Path("elsewhere")) == Path("elsewhere")
    forget(run, 20)  # a run that goes on from there makes the others again
    assert sorted(decoded(run.checkpoints)) == [10, 20]


def test_no_decoded_checkpoint_and_a_damaged_file_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint was decoded; set train\.decode_prompts"):
        named(tmp_path, Path("best"))
    (tmp_path / "best.json").write_text("{}")
    with pytest.raises(ValueError, match=r"best\.json: damaged; delete it"):
        named(tmp_path, Path("best"))


def test_a_run_decodes_at_its_checkpoints_and_where_it_was_stopped_before_that(ready, monkeypatch) -> None:
    """The second checkpoint is written, but the process ends before it is decoded: the next one does that first."""
    straight, broken = ready("straight"), ready("broken")
    changes: dict[str, Any] = {"train": {"decode_prompts": 3}, "evaluate": {"max_new_tokens": 12}}
    straight.train(**changes)
    real, calls = stage.measured, []

    def ends(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "measured", ends)
        broken.train(**changes, run={})
    assert sorted(decoded(broken.run.checkpoints)) == [3]
    rows = [row for row in read_metrics(straight.run.metrics) if row["kind"] == "decode"]
    assert [row["step"] for row in rows] == [3, 6] and all(1 <= row["accept_length"] <= 4 and row["prompts"] == 3 for row in rows)
    broken.train(**changes)
    assert decoded(straight.run.checkpoints).keys() == {3, 6} and steps_of(straight.run) == [3, 6]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.parallel=fsdp", "train.optimizer=muon"], r"needs whole matrices"),
        (["train.parallel=fsdp", "distill.preset=draft_opd"], r"rollouts decode with the whole drafter"),
        (["stream.staleness=1"], r"stream\.staleness=1: only branches are drawn ahead"),
        (["train.rows=4", "train.accumulate=5"], r"train\.accumulate=5 micro-batches of train\.rows=4"),
        (["train.decode_prompts=101"], r"train\.decode_prompts=101 is above prompts\.held_out=100"),
    ],
)
def test_what_cannot_be_is_refused_when_the_run_file_is_read(overrides: list[str], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        load_config(None, overrides)
    assert "\n" not in str(caught.value)


def test_tensorboard_without_its_package_is_refused(ready, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"train\.tensorboard needs the package `tensorboard`"):
        ready().train(train={"tensorboard": True})
