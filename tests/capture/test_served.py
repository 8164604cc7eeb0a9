"""Features from servers: the same as in this process, in the order asked for, and every fault of a server is one line."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import shutil
import threading
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_stub import StubServer
from specgraft.capture import stage, states_file
from specgraft.capture.forward import capture_batch
from specgraft.capture.served import ServedStates, sweep
from specgraft.capture.stage import capture, feature_header
from specgraft.check.gates import recorded
from specgraft.config import RunConfig
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run import Session
from specgraft.run_dir import RunDir, read_json
from specgraft.run_file import load_config
from specgraft.stream.shards import ShardReader

TAPS = [0, 2]
ONE = threading.Lock()  # a target makes one pass at a time


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=4, markov=2.0)


def pass_of(target: Any, ids: list[int], taps: list[int]) -> Features:
    with ONE:
        return capture_batch(target, [dataclasses.replace(row(0, 2), input_ids=ids)], taps)[0]


def row(number: int, length: int) -> Conversation:
    ids = torch.randint(2, 60, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return Conversation(f"p{number}", "f", "en", "chat", "train", ids, [False] + [True] * (length - 1), 1, 0.0, 1.0, 0, "length", ids_digest(ids[1:]))


class Writer:
    """What vLLM with our connector leaves behind: a file of states of the tiny target, its layers in the header."""

    def __init__(self, target: Any, folder: Path, taps: list[int] = TAPS) -> None:
        self.target, self.folder, self.taps, self.numbers = target, folder, taps, count()
        self.change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
        self.note: dict[str, Any] = {"layer_ids": "output of layer i, pre-norm", "layers": [*taps, target.num_layers - 1]}
        folder.mkdir(exist_ok=True)

    def tensors(self, ids: list[int]) -> dict[str, torch.Tensor]:
        features = pass_of(self.target, ids, self.taps)
        return self.change({"hidden_states": torch.cat([features.taps, features.last[:, None]], 1).contiguous(), "token_ids": torch.tensor(ids)})

    def path(self) -> Path:
        return self.folder / f"cmpl-specgraft-x-{next(self.numbers)}-0-abc.safetensors"

    def said(self, path: Path) -> dict[str, Any]:
        return {"kv_transfer_params": {"hidden_states_path": f"/where/the/server/sees/it/{path.name}"}}

    def __call__(self, ids: list[int]) -> dict[str, Any]:
        path = self.path()
        save_file(self.tensors(ids), path, metadata={"specgraft": json.dumps(self.note)})
        path.with_name(path.name + ".lock").touch()
        return self.said(path)


@pytest.fixture
def writer(target, tmp_path: Path) -> Writer:
    return Writer(target, tmp_path / "states")


def config_of(*urls: str, folder: Path, **more: Any) -> RunConfig:
    part = {"taps": TAPS, "servers": list(urls), "states": str(folder), "retries": 0, "timeout": 5.0, **more}
    return RunConfig.model_validate({"target": {"dtype": "float32"}, "capture": part})


def served(target: Any, *urls: str, folder: Path, **more: Any) -> ServedStates:
    config = config_of(*urls, folder=folder, **more)
    return ServedStates(config.capture, feature_header(config, target), target.num_layers)


def test_rows_come_in_the_order_asked_for_and_equal_those_of_this_process(target, writer) -> None:
    rows = [row(number, length) for number, length in enumerate([3, 40, 5, 21, 8, 13, 30, 2])]
    slow = {tuple(rows[1].input_ids): 0.3}
    with (
        StubServer(states=writer, delay=lambda ids: slow.get(tuple(ids), 0.0)) as first,
        StubServer(states=writer) as second,
    ):
        found = list(served(target, first.url, second.url, folder=writer.folder, concurrency=2).states(rows))
        assert sorted(first.asked + second.asked) == sorted(c.input_ids for c in rows) and first.asked and second.asked
        bodies = first.bodies + second.bodies
    assert {(body["max_tokens"], body["temperature"]) for body in bodies} == {(1, 0)}
    assert len({body["request_id"] for body in bodies}) == len(rows)
    for wanted, got in zip(rows, found, strict=True):
        own = capture_batch(target, [wanted], TAPS)[0]
        assert got.prompt_id == wanted.prompt_id and got.input_ids.tolist() == wanted.input_ids
        assert got.loss_mask.tolist() == wanted.loss_mask
        assert torch.equal(got.taps, own.taps) and torch.equal(got.last, own.last)
    assert not list(writer.folder.iterdir())  # files and locks are gone


def test_the_last_layer_as_a_tap(target, tmp_path) -> None:
    writer = Writer(target, tmp_path / "states", [1, 3])
    writer.note["layers"] = [1, 3]
    writer.change = lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"][:, :2].contiguous()}
    with StubServer(states=writer) as server:
        found = next(served(target, server.url, folder=writer.folder, taps=[1, 3]).states([row(1, 9)]))
    own = capture_batch(target, [row(1, 9)], [1, 3])[0]
    assert torch.equal(found.taps, own.taps) and torch.equal(found.last, own.last)


def test_no_more_is_asked_for_than_may_wait_and_an_endless_order_can_be_left(target, writer) -> None:
    with StubServer(states=writer) as server:
        feed = served(target, server.url, folder=writer.folder).states((row(number, 10) for number in count()), ahead=30)
        assert [features.prompt_id for features in islice(feed, 5)] == ["p0", "p1", "p2", "p3", "p4"]
        time.sleep(0.3)
        assert 5 <= len(server.asked) <= 8
        began = time.monotonic()
        feed.close()
        assert time.monotonic() - began < 3
        asked = len(server.asked)
        time.sleep(0.2)
        assert len(server.asked) == asked


def half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "hidden_states": tensors["hidden_states"][16:].contiguous()}


def other_ids(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "token_ids": tensors["token_ids"].flip(0).contiguous()}


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "hidden_states": tensors["hidden_states"][..., :8].contiguous()}


def as_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "hidden_states": tensors["hidden_states"].bfloat16()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (half, r"24 states came for 40 ids: prefix caching or truncation is on; start it with `specgraft serve vllm TARGET --taps 0,2`"),
        (other_ids, "its states are of other ids than were sent"),
        (narrow, r"its states are \(3, 8\) and \(3, 32\) were expected"),
        (as_bfloat16, r"torch\.bfloat16 and the target is torch\.float32"),
    ],
)
def test_states_that_were_not_asked_for_stop_the_run(target, writer, change, said) -> None:
    writer.change = change
    with StubServer(states=writer) as server, pytest.raises(ValueError, match=said) as error:
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    assert str(error.value).startswith(f"{server.url}: p4: ") and "\n" not in str(error.value)
    assert len(server.asked) == 1 and not list(writer.folder.iterdir())


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ({}, "do not say which layers they hold"),
        ({"layer_ids": "output of layer i, pre-norm", "layers": [1, 3, 4]}, r"of the layers \[1, 3, 4\] and \[0, 2, 3\] are wanted"),
        ({"layer_ids": "post-norm", "layers": [0, 2, 3]}, "do not say which layers they hold"),
    ],
)
def test_layers_are_named_in_the_file_or_it_is_refused(target, writer, note, said) -> None:
    writer.note = note
    with StubServer(states=writer) as server, pytest.raises(ValueError, match=said):
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "it returns no hidden states: start it with `specgraft serve vllm TARGET --taps"),
        ({"kv_transfer_params": {"hidden_states_path": "/etc/passwd"}}, "'passwd', no name of a file of states"),
        ({"kv_transfer_params": {"hidden_states_path": "/x/..safetensors"}}, "no name of a file of states"),
        ({"choices": [{"prompt_token_ids": [1, 2]}]}, "has states of other ids than were sent"),
        ({"choices": [{"token_ids": [1]}]}, "names no prompt ids"),
    ],
)
def test_answers_that_are_no_states(target, writer, answer, said) -> None:
    with StubServer(states=lambda ids: answer) as server, pytest.raises(ValueError, match=said):
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))


def test_a_file_that_is_cut_off_is_asked_for_again(target, writer) -> None:
    cut = [True, False]

    def answer(ids: list[int]) -> dict[str, Any]:
        said = writer(ids)
        if cut.pop(0):
            path = next(writer.folder.glob("*.safetensors"))
            path.write_bytes(path.read_bytes()[:-1])
        return said

    with StubServer(states=answer) as server:
        assert len(list(served(target, server.url, folder=writer.folder, retries=1).states([row(4, 40)]))) == 1
        cut.append(True)
        with pytest.raises(ValueError, match=r"p4: a damaged file of states \(.*\) \(1 tries\)"):
            list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    assert not list(writer.folder.iterdir())


def test_a_file_is_read_when_its_writer_lets_go_and_not_before(target, writer) -> None:
    """The lock is held, half of the file is there; the rest comes 0.4 s later."""

    def answer(ids: list[int]) -> dict[str, Any]:
        path = writer.path()
        save_file(writer.tensors(ids), path, metadata={"specgraft": json.dumps(writer.note)})
        whole, held = path.read_bytes(), path.with_name(path.name + ".lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
        path.write_bytes(whole[: len(whole) // 2])

        def finish() -> None:
            path.write_bytes(whole)
            held.close()

        threading.Timer(0.4, finish).start()
        return writer.said(path)

    with StubServer(states=answer) as server:
        found = next(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    assert torch.equal(found.last, capture_batch(target, [row(4, 40)], TAPS)[0].last)


def test_a_full_disk_at_the_server_is_told(target, writer) -> None:
    def answer(ids: list[int]) -> dict[str, Any]:
        path = writer.path()
        path.with_name(path.name + ".lock").write_text("No space left on device (os error 28)")
        return writer.said(path)

    began = time.monotonic()
    with StubServer(states=answer) as server, pytest.raises(ValueError, match=r"p4: its states were not written \(No space left on device") as error:
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    assert time.monotonic() - began < 5 and str(writer.folder) in str(error.value)


def test_a_server_that_dies_behind_its_answer_and_another_folder(target, writer, monkeypatch) -> None:
    monkeypatch.setattr(states_file, "LATE", 0.2)

    def dead(ids: list[int]) -> dict[str, Any]:
        path = writer.path()
        path.with_name(path.name + ".lock").touch()  # let go by a process that is gone
        return writer.said(path)

    with StubServer(states=dead) as server, pytest.raises(ValueError, match=r"were not written \(it ended before that\)"):
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    with StubServer(states=lambda ids: writer.said(writer.path())) as server, pytest.raises(ValueError, match=r"are not in .*: is that the folder that it was started with"):
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))


def test_a_file_that_is_never_finished_does_not_hold_up_who_stops(target, writer) -> None:
    """The server hangs while it writes."""
    locks = []

    def answer(ids: list[int]) -> dict[str, Any]:
        if len(ids) == 3:
            return writer(ids)
        path = writer.path()
        locks.append(path.with_name(path.name + ".lock").open("w"))
        fcntl.flock(locks[0], fcntl.LOCK_EX)
        return writer.said(path)

    with StubServer(states=answer) as server:
        rows = served(target, server.url, folder=writer.folder, timeout=60.0).states([row(3, 3), row(4, 40)])
        next(rows)
        while not locks:
            time.sleep(0.01)
        began = time.monotonic()
        rows.close()
    assert time.monotonic() - began < 5 and not list(writer.folder.iterdir())
    locks[0].close()


def test_a_folder_without_locks_is_refused(target, writer, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(states_file.fcntl, "flock", refuse)
    with StubServer(states=writer) as server, pytest.raises(ValueError, match=r"no file can be locked there \(No locks available\); use a local folder"):
        list(served(target, server.url, folder=writer.folder).states([row(4, 40)]))


def test_what_servers_left_for_dead_processes_is_swept(tmp_path) -> None:
    for name in ("cmpl-specgraft-ab-999999999-x-0.safetensors", "cmpl-specgraft-ab-1-x-0.safetensors", "cmpl-specgraft-cd-999999999-x.safetensors"):
        (tmp_path / name).touch()
    sweep(tmp_path, "ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cmpl-specgraft-ab-1-x-0.safetensors", "cmpl-specgraft-cd-999999999-x.safetensors"]


def flat(target: Any, ids: list[int], taps: list[int]) -> dict[str, Any]:
    features = pass_of(target, ids, taps)
    rows = torch.cat([features.taps, features.last[:, None]], 1).flatten(1).tolist()
    return {"meta_info": {"hidden_states": [rows]}}


def test_states_of_sglang_as_its_source_says(target, writer) -> None:
    with StubServer("sglang", states=lambda ids: flat(target, ids, TAPS), info={"return_aux_hidden_state_layer_ids": [0, 2, 3]}) as server:
        found = next(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
        own = capture_batch(target, [row(4, 40)], TAPS)[0]
        assert torch.equal(found.taps, own.taps) and torch.equal(found.last, own.last)
        assert server.bodies[0]["return_hidden_states"] is True and server.bodies[0]["extra_key"] == "p4"
        server.info = {"return_aux_hidden_state_layer_ids": [0, 2]}
        with pytest.raises(ValueError, match=r"returns the layers \[0, 2\] and \[0, 2, 3\] are wanted"):
            next(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    short = StubServer("sglang", states=lambda ids: flat(target, ids[8:], TAPS), info={"return_aux_hidden_state_layer_ids": [0, 2, 3]})
    with short as server, pytest.raises(ValueError, match="32 states came for 40 ids"):
        next(served(target, server.url, folder=writer.folder).states([row(4, 40)]))
    with StubServer("llamacpp") as server, pytest.raises(ValueError, match="llamacpp gives no hidden states: use vllm or sglang"):
        next(served(target, server.url, folder=writer.folder).states([row(4, 40)]))


def stored(run: RunDir) -> dict[str, Any]:
    reader = ShardReader(run.features, "train")
    return {reader[index].prompt_id: reader[index] for index in range(len(reader))}


def test_capture_writes_the_same_shards_as_in_process(target, writer, tmp_path) -> None:
    rows = [row(number, length) for number, length in enumerate([7, 20, 3, 11, 30, 5, 9, 16, 4])]
    with StubServer(states=writer) as server:
        config = config_of(server.url, folder=writer.folder, shard_tokens=24, batch_tokens=1)
        runs = [RunDir(tmp_path / name).create() for name in ("here", "there")]
        capture(config.model_copy(update={"capture": config.capture.model_copy(update={"servers": []})}), runs[0], target, rows)
        capture(config, runs[1], target, rows)
    here, there = (read_json(run.features / "manifest.json") for run in runs)
    assert here == there  # checksums too


def test_a_server_that_dies_mid_run_stops_it_and_what_came_is_kept(target, writer, tmp_path) -> None:
    rows = [row(number, 10) for number in range(12)]
    run = RunDir(tmp_path / "run").create()
    with StubServer(states=writer, kill_after=8) as server:
        config = config_of(server.url, folder=writer.folder, concurrency=1, shard_tokens=30)
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"p\d+: no connection .* \(1 tries\); see to the server and start again"):
            capture(config, run, target, rows)
        assert time.monotonic() - began < 10
        kept = stored(run)
        assert len(kept) == 7  # two shards of three rows, and one row of the third
        server.restart()
        capture(config, run, target, rows)
        assert len(server.asked) == 8 + 5
    for name, features in stored(run).items():
        own = capture_batch(target, [rows[int(name[1:])]], TAPS)[0]
        assert torch.equal(features.taps, own.taps)
    assert not list(writer.folder.iterdir())


def test_an_error_of_the_server_is_tried_again_and_named(target, writer) -> None:
    with StubServer(states=writer, errors={1: 500}) as server:
        assert len(list(served(target, server.url, folder=writer.folder, retries=1).states([row(1, 5)]))) == 1
    with StubServer(states=writer, errors=500) as server, pytest.raises(ValueError, match=r"p1: HTTP 500 scripted error 500 \(1 tries\)"):
        list(served(target, server.url, folder=writer.folder).states([row(1, 5)]))


def test_broken_states_are_left_out_and_counted_as_in_process(target, writer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stage, "FAULT_RATE", 0.2)
    rows = [row(number, 10) for number in range(10)]
    run = RunDir(tmp_path / "run").create()
    plain = writer.tensors

    def tensors(ids: list[int]) -> dict[str, torch.Tensor]:
        found = plain(ids)
        return {**found, "hidden_states": found["hidden_states"] * float("nan")} if ids == rows[3].input_ids else found

    writer.tensors = tensors  # type: ignore[method-assign]
    with StubServer(states=writer) as server:
        capture(config_of(server.url, folder=writer.folder), run, target, rows)
    assert read_json(run.features / "manifest.json")["notes"]["left_out"] == {"p3": "taps not finite"}


def test_a_full_disk_here_stops_the_run_and_leaves_no_states(target, writer, tmp_path, monkeypatch) -> None:
    from specgraft.stream import shards

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with StubServer(states=writer) as server:
        with pytest.raises(ValueError, match=r"shard could not be written \(No space left on device\)"):
            capture(config_of(server.url, folder=writer.folder), RunDir(tmp_path / "run").create(), target, [row(number, 10) for number in range(6)])
    assert not list(writer.folder.glob("*.safetensors"))


def test_a_run_captures_through_a_server_and_its_gates_compare_with_the_target(make_run_file, tmp_path) -> None:
    path = make_run_file(tmp_path)
    with StubServer() as server:
        work = Session(load_config(path, [f'capture.servers=["{server.url}"]', f'capture.states="{tmp_path / "states"}"', "capture.retries=0"]))
        work.regen()
        writer = Writer(work.target, tmp_path / "states", [0, 1, 2])
        server.states = writer
        writer.change = lambda tensors: {**tensors, "hidden_states": tensors["hidden_states"].roll(1, 1)}  # of other layers
        with pytest.raises(ValueError, match="gate 'tap identity' failed"):
            work.capture()
        assert not (work.run.features / "manifest.json").exists()
        writer.change = lambda tensors: tensors
        work.capture()
        assert {name: gate["passed"] for gate in recorded(work.run) if "identity" in (name := gate["name"])} == {
            "token identity": True, "tap identity": True, "distribution identity": True,
        }  # fmt: skip
        live_training(path, work, server.url, writer.folder)
        outer_target(path, work, server.url, writer.folder)


def live_training(path: Path, work: Session, url: str, folder: Path) -> None:
    """Training without a capture before it: states of servers give the losses of this process."""
    losses = {}
    for name, servers in (("here", "[]"), ("there", f'["{url}"]')):
        settings = ['stream.medium="memory"', f"capture.servers={servers}", f'capture.states="{folder}"', f"run.name={name}"]
        live = Session(load_config(path, [*settings, "train.steps=2", "train.validate_every=2"]))
        shutil.copytree(work.run.regen, live.run.regen)
        shutil.copytree(work.run.prompts, live.run.prompts)
        live.train()
        losses[name] = [row["loss"] for line in live.run.metrics.read_text().splitlines() if "loss" in (row := json.loads(line))]
        assert not live.run.features.exists()
    assert len(losses["here"]) == 2 and losses["here"] == losses["there"]


def outer_target(path: Path, work: Session, url: str, folder: Path) -> None:
    """The same run where the target is too large for this process: what cannot be compared is said, and must be allowed."""
    settings = [f'capture.servers=["{url}"]', f'capture.states="{folder}"', 'capture.target="outer"', "train.steps=2", "train.validate_every=2"]
    before = work.run.features.rename(work.run.root / "whole")
    with pytest.raises(ValueError, match="gate 'tap identity' failed: not run: the target's layers are not loaded here"):
        Session(load_config(path, settings)).capture()
    outer = Session(load_config(path, settings), frozenset(["tap identity"]))
    outer.capture()
    assert not hasattr(outer.target, "layers")
    gates = {gate["name"]: gate for gate in recorded(outer.run)}
    assert gates["distribution identity"]["passed"] and "log-probabilities not run" in gates["distribution identity"]["detail"]
    assert not gates["tap identity"]["passed"]
    rows = [{entry["prompt_id"]: entry["digest"] for shard in read_json(place / "manifest.json")["shards"] for entry in shard["rows"]} for place in (before, outer.run.features)]
    assert rows[0] == rows[1]
    assert outer.train().name == "step-000002"


def test_a_target_of_several_streams_is_captured_in_process(target, writer, tmp_path, monkeypatch) -> None:
    config = config_of("http://127.0.0.1:1", folder=writer.folder)
    monkeypatch.setattr(target, "streams", 4)
    with pytest.raises(ValueError, match=r"capture\.servers: a target with 4 residual streams is captured in this process alone"):
        stage.producer(config, target, {"taps": TAPS})
