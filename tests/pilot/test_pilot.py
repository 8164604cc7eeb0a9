"""All stages in a row on a tiny target: what a run leaves, that a second one repeats nothing, that a gate stops it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.check.gates import NAMES, GateError
from specgraft.pilot import stage
from specgraft.pilot.stage import pilot
from specgraft.records import Features
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.stream.shards import ShardReader

KEYS = {
    "accept_length_t0", "accept_length_t1", "accept_length_pooled_t0", "predicted_accept_length", "agreement",
    "lossless_mismatches", "lossless_ties", "speedup_t0", "minutes", "gates",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Done:
    run_file: Path
    summary: dict[str, Any]
    seconds: float

    @property
    def root(self) -> Path:
        return self.run_file.parent / "runs" / "pilot"

    def session(self, *overrides: str, allow: frozenset[str] = frozenset()) -> Session:
        return Session(load_config(self.run_file, list(overrides)), allow)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def done(make_run_file: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    path = make_run_file(tmp_path_factory.mktemp("pilot"))
    began = time.process_time()
    summary = pilot(Session(load_config(path)))
    return Done(path, summary, time.process_time() - began)


def test_the_summary_holds_every_number_the_pilot_promises(done: Done) -> None:
    assert json.loads((done.root / "summary.json").read_text()) == done.summary
    assert KEYS <= set(done.summary)
    summary = done.summary
    assert set(summary["gates"]) == set(NAMES) - {"engine agreement"} and all(summary["gates"].values())  # that one needs an engine
    assert 1 <= summary["accept_length_t0"] <= 3 and 1 <= summary["accept_length_t1"] <= 3
    assert summary["lossless_mismatches"] == 0 and summary["lossless_prompts"] == 5
    assert summary["agreement"] <= 0.05
    pooled, predicted = summary["accept_length_pooled_t0"], summary["predicted_accept_length"]
    assert summary["agreement"] == pytest.approx(abs(pooled - predicted) / pooled)
    assert summary["speedup_t0"] > 0 and 0 < summary["minutes"] < 60


def test_every_stage_leaves_its_files_whole(done: Done) -> None:
    left = {path.name for path in done.root.iterdir()}
    assert left == {
        "config.json", "prompts", "regen", "data.json", "features", "checkpoints", "metrics.jsonl", "evaluate.json", "confidence.json", "export",
        "gates.json", "overfit.json", "summary.json", "report.html", "timing.json", ".features.lock", ".train.lock",
    }  # fmt: skip
    assert not [path for path in done.root.rglob(".*") if path.name.endswith("tmp")]
    assert [path.name for path in sorted((done.root / "checkpoints").iterdir())] == ["step-000004", "step-000008"]
    data = json.loads((done.root / "data.json").read_text())
    assert data["conversations"] == 15 and data["splits"] == {"train": 10, "heldout": 5}
    assert json.loads((done.root / "config.json").read_text()) == load_config(done.run_file).model_dump(mode="json")


def test_the_report_is_one_page_of_this_run(done: Done) -> None:
    page = (done.root / "report.html").read_text()
    assert "<html" in page and "pilot" in page and "src=\"http" not in page
    for gate in NAMES:
        assert gate in page


def test_a_second_run_repeats_no_work_and_ends_with_the_same_numbers(done: Done, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from specgraft.capture import stage as capture_stage
    from specgraft.evaluate import stage as evaluate_stage
    from specgraft.regen import stage as regen_stage
    from specgraft.train import tasks as train_tasks

    for module, name in (
        (regen_stage, "generate"), (capture_stage.ShardWriter, "add"), (stage, "overfit"), (train_tasks, "objective"),
        (evaluate_stage, "decode"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *args, name=name: pytest.fail(f"{name} ran again"))
    metrics = (done.root / "metrics.jsonl").read_text()
    began = time.process_time()
    summary = pilot(done.session())
    assert time.process_time() - began < 0.5 * done.seconds
    assert {k: v for k, v in summary.items() if k != "minutes"} == {k: v for k, v in done.summary.items() if k != "minutes"}
    assert (done.root / "metrics.jsonl").read_text() == metrics
    out = capsys.readouterr().out
    assert "accept length" in out and f"report: {done.root / 'report.html'}" in out


@pytest.mark.parametrize(("setting", "stage_name"), [("draft_tokens=3", "evaluate"), ("kind=mtp", "evaluate"), ("markov_rank=8", "export")])
def test_a_checkpoint_of_another_drafter_is_no_part_of_the_run(done: Done, setting: str, stage_name: str) -> None:
    before = (done.root / "config.json").read_text()
    with pytest.raises(ValueError, match=rf"step-000008: trained with drafters\.{setting.split('=')[0]}=.*set it back"):
        getattr(done.session(f"drafters.{setting}"), stage_name)()
    assert (done.root / "config.json").read_text() == before


def test_other_evaluation_settings_are_measured_anew(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(Session, "evaluate", lambda self, checkpoint: measured.append(checkpoint) or {})
    checkpoint = done.root / "checkpoints" / "step-000008"
    assert stage.evaluated(done.session(), checkpoint)["t0"] and not measured
    stage.evaluated(done.session("evaluate.max_new_tokens=9"), checkpoint)
    assert measured == [checkpoint]


def test_a_gate_that_fails_stops_the_run_and_is_on_record(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overfit gate of a drafter that has learnt nothing; allowed by name, the run goes on and says so."""
    monkeypatch.setattr(stage, "overfit", lambda *args: 1.0)
    train = []
    monkeypatch.setattr(Session, "train", lambda self: train.append(1))
    gates, remembered = done.root / "gates.json", done.root / "overfit.json"
    before, measured = gates.read_text(), remembered.read_text()
    remembered.unlink()
    try:
        with pytest.raises(GateError, match=r"gate 'overfit' failed: accept length 1\.000") as caught:
            pilot(done.session())
        assert not train and "\n" not in str(caught.value)
        recorded = {row["name"]: row for row in json.loads(gates.read_text())["gates"]}
        assert recorded["overfit"]["passed"] is False and "allowed" not in recorded["overfit"]
        pilot(done.session(allow=frozenset(["overfit"])))
        recorded = {row["name"]: row for row in json.loads(gates.read_text())["gates"]}
        assert train and recorded["overfit"]["allowed"] is True
    finally:
        gates.write_text(before)
        remembered.write_text(measured)


def test_the_overfit_check_is_remembered_for_its_own_drafter_only(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = done.root / "overfit.json"
    before = remembered.read_text()
    monkeypatch.setattr(stage, "overfit", lambda *args: -1.0)
    try:
        assert stage.overfitted(done.session(), done.session().conversations()) > 0
        for other in ("drafters.layers=2", "drafters.markov_rank=5", "run.seed=3"):
            work = done.session(other)
            assert stage.overfitted(work, done.session().conversations()) == -1.0
            remembered.write_text(before)
    finally:
        remembered.write_text(before)


def test_neither_a_refused_setting_nor_a_report_changes_what_the_run_says_of_itself(done: Done) -> None:
    before = (done.root / "config.json").read_text()
    with pytest.raises(ValueError, match="another `regen`"):
        pilot(done.session("regen.top_k=3"))
    done.session("train.lr=1").report()
    assert (done.root / "config.json").read_text() == before
    with pytest.raises(ValueError, match="no such run folder"):
        done.session("run.name=never").report()
    assert not (done.root.parent / "never").exists()


def test_the_mask_token_of_a_finished_run_cannot_change_unnoticed(done: Done) -> None:
    with pytest.raises(ValueError, match=r"trained with drafter\.mask_token_id="):
        done.session("target.mask_token_id=270").train()


def test_other_held_out_prompts_are_measured_anew(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(Session, "evaluate", lambda self, checkpoint: measured.append(checkpoint) or {})
    own = Session.conversations
    monkeypatch.setattr(Session, "conversations", lambda self: own(self)[::-1])
    stage.evaluated(done.session(), done.root / "checkpoints" / "step-000008")
    assert measured


def test_an_answer_behind_the_length_limit_cannot_be_learnt_by_heart(done: Done) -> None:
    work = done.session("train.max_length=8")
    with pytest.raises(ValueError, match=r"lies inside train\.max_length=8"):
        stage.overfit(work.config, work.header["taps"], work.conversations())


def test_features_are_checked_as_they_lie_in_the_shards(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that hands out the row before the one asked for is caught by the gates, by name."""
    work = done.session()
    conversations = work.conversations()
    assert all(result.passed for result in work.stored_gates(conversations))
    right = ShardReader.__getitem__

    def shifted(self: ShardReader, item: int) -> Features:
        row, other = right(self, item), right(self, (item + 1) % len(self))
        length = min(len(row.input_ids), len(other.input_ids))
        taps = row.taps.clone()
        taps[:length] = other.taps[:length]
        return dataclasses.replace(row, taps=taps)

    monkeypatch.setattr(ShardReader, "__getitem__", shifted)
    failed = {result.name for result in work.stored_gates(conversations) if not result.passed}
    assert "tap identity" in failed
