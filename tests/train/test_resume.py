"""A run that was stopped and goes on is the run that was never stopped: weights, optimiser and metrics, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specgraft.log import read_metrics
from specgraft.stream.shards import ShardReader
from specgraft.train import tasks
from specgraft.train.batch import step_batches, step_rows
from specgraft.train.checkpoint import checkpoints
from specgraft.train.told import MEASURED

CPU = torch.device("cpu")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in read_metrics(path)]


def assert_same_checkpoint(left: Path, right: Path) -> None:
    assert left.name == right.name
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        a, b = load_file(left / name), load_file(right / name)
        assert set(a) == set(b)
        for key in a:
            assert torch.equal(a[key], b[key]), (name, key)


def stopped_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next training stops in the middle of this step (counted from 1 within that process)."""
    real, calls = tasks.objective, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tasks, "objective", stop)


@pytest.mark.parametrize("sampling", [False, True], ids=["weighed", "drawn"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_six_steps_equal_three_and_three(ready, monkeypatch, optimizer: str, sampling: bool) -> None:
    """Stopped in the middle of step 6, behind a validation and two steps that no checkpoint holds."""
    changes = {"train": {"optimizer": optimizer, "weight_decay": 0.1}, "distill": {"slot_sampling": sampling}}
    straight, stopped = ready("straight"), ready("stopped")
    straight.train(**changes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 6)
        stopped.train(**changes)
    assert [path.name for path in checkpoints(stopped.run.checkpoints)] == ["step-000003"]
    assert [row["step"] for row in rows_of(stopped.run.metrics) if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    stopped.train(**changes)
    for a, b in zip(checkpoints(straight.run.checkpoints), checkpoints(stopped.run.checkpoints), strict=True):
        assert_same_checkpoint(a, b)
    rows = rows_of(straight.run.metrics)
    assert rows == rows_of(stopped.run.metrics)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["kind"] == "validate"] == [2, 4, 6]


def test_a_run_stopped_before_its_first_checkpoint_starts_again(ready, monkeypatch) -> None:
    straight, stopped = ready("straight"), ready("stopped")
    straight.train()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 2)
        stopped.train()
    stopped.train()
    assert_same_checkpoint(checkpoints(straight.run.checkpoints)[-1], checkpoints(stopped.run.checkpoints)[-1])
    assert rows_of(straight.run.metrics) == rows_of(stopped.run.metrics)


def test_a_metrics_line_cut_by_a_kill_is_made_again(ready, monkeypatch) -> None:
    straight, stopped = ready("straight"), ready("stopped")
    straight.train()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 6)
        stopped.train()
    text = stopped.run.metrics.read_text()
    stopped.run.metrics.write_text(text[:-40])
    stopped.train()
    assert rows_of(straight.run.metrics) == rows_of(stopped.run.metrics)


def test_a_finished_run_is_not_trained_again(ready, monkeypatch) -> None:
    run = ready()
    run.train()
    before = run.run.metrics.read_text()
    monkeypatch.setattr(tasks, "objective", lambda *args: pytest.fail("trained"))
    run.train()
    assert run.run.metrics.read_text() == before


def test_how_often_it_is_validated_and_saved_does_not_change_the_training(ready) -> None:
    often, seldom = ready("often"), ready("seldom")
    often.train(train={"validate_every": 1, "checkpoint_every": 1})
    seldom.train(train={"validate_every": 100, "checkpoint_every": 100})
    assert_same_checkpoint(checkpoints(often.run.checkpoints)[-1], checkpoints(seldom.run.checkpoints)[-1])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("train", "lr", 1e-3), ("train", "steps", 9), ("train", "rows", 2), ("run", "seed", 1), ("distill", "decay", 2.0),
     ("drafters", "markov_rank", 4)],
)  # fmt: skip
def test_going_on_with_another_setting_is_refused_naming_it(ready, monkeypatch, section: str, key: str, value: Any) -> None:
    run = ready()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 5)
        run.train()
    before = run.run.metrics.read_text()
    with pytest.raises(ValueError, match=rf"trained with {section}\.{key}=.*, now {value!r}") as caught:
        run.train(**{section: {key: value}})
    assert "\n" not in str(caught.value) and run.run.metrics.read_text() == before
    assert [path.name for path in checkpoints(run.run.checkpoints)] == ["step-000003"]
    run.train()  # nothing was spoilt


def test_settings_that_do_not_change_weights_may_change(ready, monkeypatch) -> None:
    run = ready()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 5)
        run.train()
    run.train(train={"checkpoint_every": 2, "keep": 5, "validate_every": 3, "validate_rows": 1})
    assert checkpoints(run.run.checkpoints)[-1].name == "step-000006"


def test_features_of_other_conversations_are_refused_on_resume(ready, monkeypatch) -> None:
    run = ready()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 5)
        run.train()
    manifest = run.run.features / "manifest.json"
    data = json.loads(manifest.read_text())
    for shard in data["shards"]:
        if shard["split"] == "train":
            shard["rows"] = shard["rows"][:-1]
    manifest.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="trained with features="):
        run.train()


def test_features_of_another_target_are_refused(ready, tiny_target) -> None:
    run = ready()
    object.__setattr__(run, "new_target", lambda: tiny_target(markov=3.0, seed=4))
    with pytest.raises(ValueError, match=r"the features were made with target=.*run capture again"):
        run.train()
    with pytest.raises(ValueError, match=r"made with taps=\[0, 2\], this run has \[0, 1\]"):
        ready("other").train(capture={"taps": [0, 1]})


def test_a_loss_that_is_not_finite_stops_the_run_and_writes_no_row_of_it(ready) -> None:
    run = ready()
    with pytest.raises(ValueError, match=r"train: step \d has loss .* lower train\.lr"):
        run.train(train={"lr": 1e30, "warmup": 0.0, "steps": 5})
    assert all(row["loss"] == row["loss"] for row in rows_of(run.run.metrics) if row["kind"] == "train")


def test_the_answers_are_learnt(ready) -> None:
    run = ready()
    train = {"steps": 40, "validate_every": 40, "checkpoint_every": 40, "lr": 2e-2, "rows": 10}
    run.train(train=train, distill={"ce": 1.0, "l1": 0.0}, drafters={"markov_rank": 32})
    rows = [row for row in rows_of(run.run.metrics) if row["kind"] == "train"]
    first, last = (sum(row["ce"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert first > 4 and last < 0.7 * first
    assert all(0 <= alpha <= 1 for row in rows for alpha in row["alpha"])


def test_every_epoch_is_a_permutation_and_a_batch_may_span_two() -> None:
    count, rows = 12, 5
    order = [index for step in range(24) for index in step_rows(count, rows, 3, step)]
    epochs = [order[start : start + count] for start in range(0, 120, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert order != [index for step in range(24) for index in step_rows(count, rows, 4, step)]
    assert len(step_rows(3, 8, 0, 0)) == 8  # fewer conversations than rows: they come again


def test_the_batch_of_a_step_does_not_depend_on_where_the_run_started(captured) -> None:
    reader = ShardReader(captured / "features", "train")
    straight = list(step_batches(reader, 4, 6, 3, 1024, 0, 0, 8, CPU))
    resumed = list(step_batches(reader, 4, 6, 3, 1024, 0, 7, 8, CPU))
    assert len(straight) == 8 and len(resumed) == 1
    assert torch.equal(straight[7].texts.input_ids, resumed[0].texts.input_ids)
    assert torch.equal(straight[7].anchors.position, resumed[0].anchors.position)
    assert not torch.equal(straight[6].anchors.position, resumed[0].anchors.position)


def test_long_rows_are_cut_at_the_limit_with_their_anchors(captured) -> None:
    reader = ShardReader(captured / "features", "train")
    for batch in step_batches(reader, 4, 30, 3, 12, 0, 0, 3, CPU):
        assert batch.texts.input_ids.shape[1] == 12
        assert (batch.anchors.position[batch.anchors.keep] <= 10).all()
        inside = batch.anchors.position[..., None] + torch.arange(1, 4) < 12
        assert not (batch.anchors.mask & ~inside).any()
