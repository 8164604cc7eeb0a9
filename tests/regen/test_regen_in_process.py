"""Several turns in process, and the rows that come of them through capture and the gates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_stub import StubServer
from specgraft.config import RunConfig
from specgraft.evaluate.stage import held_out, prompt_of
from specgraft.records import read_conversations
from specgraft.regen import stage
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.targets.generate import Request, generate


@pytest.fixture
def config(make_run_file: Callable[[Path], Path], tmp_path: Path) -> RunConfig:
    """A run whose prompts have one to three turns; the tiny target seldom ends an answer, so its limit ends few of them."""
    path = make_run_file(tmp_path)
    source = tmp_path / "prompts.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["messages"] += [{"role": "user", "content": f"go on {turn}"} for turn in range(number % 3)]
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return load_config(path)


@pytest.fixture
def session(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Its target ends an answer now and then: many ids are end tokens."""
    work = Session(config)
    monkeypatch.setattr(work.target, "end_ids", (*range(0, 262, 5), 261))
    return work


def test_turns_are_answered_one_behind_the_other_and_every_gate_holds(session: Session) -> None:
    rows = session.regen()
    assert any(len(row.spans) > 1 for row in rows) or any(row.row > 1 for row in rows)
    spans = [(row, span) for row in rows for span in row.spans]
    for row, span in spans:
        if row.temperature == 0:
            request = Request(row.input_ids[: span.start], 20)
            generate(session.target, [request], 1)
            assert request.output == row.input_ids[span.start : span.stop]
    assert all(gate.passed for gate in session.token_gates(rows))
    session.capture()  # gates of tokens, taps and distribution, before and on the shards
    results = {gate.name: gate for gate in session.check(every=True)}
    assert "shards as regen left them" in results["token identity"].detail
    assert results["token identity"].measured["stored_rows"] <= len(rows)
    prompts = [row.prompt_id for row in rows if row.split == "heldout"]
    assert [row.prompt_id for row in held_out(session.config, session.run, prompts)] == prompts
    for row in held_out(session.config, session.run, prompts):
        assert not any(row.loss_mask[: len(prompt_of(row))]) and row.loss_mask[len(prompt_of(row))]


def test_a_kill_between_two_turns_leads_to_the_same_bytes(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = session.regen()
    files = {path.name: path.read_bytes() for path in session.run.regen.iterdir()}
    again = Session(session.config.model_copy(update={"run": session.config.run.model_copy(update={"name": "again"})}))
    again.__dict__["target"] = session.target
    calls = 0

    def killed(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        generate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "generate", killed)
        with pytest.raises(KeyboardInterrupt):
            again.regen()
    assert again.regen() == whole
    assert {path.name: path.read_bytes() for path in again.run.regen.iterdir()} == files


def test_an_id_changed_in_a_shard_is_seen(session: Session) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    session.regen()
    session.capture()
    path = next(iter(sorted(session.run.features.glob("train-*.safetensors"))))
    tensors = load_file(path)
    with safe_open(path, framework="pt") as shard:
        about = shard.metadata()
    tensors["input_ids"][3] += 1
    save_file(tensors, path, metadata=about)
    conversations = session.conversations()
    (gate,) = session.shard_gates(session.token_gates(conversations), conversations)
    assert not gate.passed and f"{path.name}, " in gate.detail and "its ids are not the conversation's" in gate.detail


def test_servers_need_no_weights_in_this_process(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgraft.targets.load.load_target", lambda *args: pytest.fail("the weights were loaded"))
    end = 261
    with StubServer(answer=lambda ids: [97, 98, end], stop_ids=(end,)) as one:
        regen = config.regen.model_copy(update={"servers": [one.url], "retries": 0})
        work = Session(config.model_copy(update={"regen": regen}))
        rows = work.regen()
        assert work.text.end_ids == (end,)
        work.passed(work.token_gates(rows))
    assert all(row.input_ids[row.prompt_length :][:2] == [97, 98] for row in rows)
    assert any(row.row == 2 for row in rows)  # "ab" is one token in a render: what was written is kept, the next turn is another row
    assert json.loads(work.run.data.read_text())["turns"] == sum(len(row.spans) for row in rows)
    kept = json.loads((work.run.regen / "settings.json").read_text())
    assert kept["answered"] == "by servers" and len(kept["target"]["weight_files"]) == 64
    assert read_conversations(work.run.regen)
