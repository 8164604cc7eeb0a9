"""What a user meets: exit codes 2 and 3, one line that says what to do, and no half-written file."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft import __version__, cli, run_dir
from specgraft.cli import guarded
from specgraft.drafters.store import save_drafter
from specgraft.run import Session

STRICT = "{{ raise_exception('roles must alternate') }}"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    def refused(self, *parts: str, code: int = 2) -> None:
        """One line on stderr with these parts, nothing on stdout."""
        assert self.code == code, self
        assert self.err.count("\n") == 1 and self.err.endswith("\n") and self.out == "", self
        for part in parts:
            assert part in self.err


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run in an empty folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["specgraft", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capfd.readouterr()
        return Said(int(stop.value.code or 0), out, err)

    return run


@pytest.fixture(scope="module")
def answered(make_run_file: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file and a run that has answers."""
    folder = tmp_path_factory.mktemp("answered")
    from specgraft.run_file import load_config

    Session(load_config(make_run_file(folder))).regen()
    return folder


@pytest.fixture
def run_file(answered: Path, tmp_path: Path) -> Path:
    """A copy of `answered` of one's own: its run file."""
    folder = Path(shutil.copytree(answered, tmp_path / "own"))
    path = folder / "run.toml"
    path.write_text(path.read_text().replace(str(answered / "runs"), str(folder / "runs")))
    return path


@pytest.fixture
def fresh_file(make_run_file: Callable[[Path], Path], tmp_path: Path) -> Path:
    folder = tmp_path / "fresh"
    folder.mkdir()
    return make_run_file(folder)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "missing.toml"], ["missing.toml: no such run file"]),
        (["pilot", "train.lrr=1"], ["unknown key `train.lrr`; did you mean `train.lr`?"]),
        (["train", "train.lr=-1"], ["train.lr", "greater than 0"]),
        (["capture", "a.toml", "b.toml"], ["two run files given, a.toml and b.toml"]),
        (["regen", "--allow", "overfti"], ["--allow 'overfti': no such gate; the gates are token identity"]),
        (["evaluate", "run.name=../up"], ["run.name"]),
        (["check", "."], ["is a folder"]),
        (["regen", "drafters.kind=dspak"], ["drafters.kind='dspak': known are mtp"]),
        (["capture", "drafters.layers=2", 'drafters.layer_types=["full_attention"]'], ["layer_types names 1 layers for 2"]),
    ],
)
def test_bad_arguments_are_one_line_and_make_no_folder(call, here: Path, arguments: list[str], parts: list[str]) -> None:
    call(*arguments).refused("error: ", *parts)
    assert list(here.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(call, fresh_file: Path, here: Path) -> None:
    (here / "file").write_text("")
    call("regen", str(fresh_file), "run.root=file/below").refused("cannot be created", "set run.root")
    assert files(here) == {"file"}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["target.id=./no-such-folder"], ["target.id='./no-such-folder': no config.json there"]),
        (["run.device=tpuu"], ["run.device='tpuu': no such device"]),
        (["prompts.source=none.jsonl"], ["none.jsonl: no such file"]),
        (["prompts.train=1000"], ["prompts.train=1000, but"]),
        (["prompts.max_tokens=8"], ["tokens, prompts.max_tokens allows 8: shorten it or raise the limit"]),
        (["regen.max_new_tokens=255"], ["the target's context is 256: lower regen.max_new_tokens"]),
    ],
)
def test_bad_input_of_regen_is_one_line_and_leaves_no_answers(call, fresh_file: Path, overrides: list[str], parts: list[str]) -> None:
    call("regen", str(fresh_file), *overrides).refused("error: ", *parts)
    left = {name for name in files(fresh_file.parent / "runs") if not name.startswith("pilot/prompts/")}  # what was drawn stays
    assert left == {"pilot/config.json", "pilot/timing.json"}


def test_a_bad_line_of_the_prompt_file_is_named(call, fresh_file: Path) -> None:
    with (fresh_file.parent / "prompts.jsonl").open("a") as file:
        file.write('{"messages": [}\n')
    call("regen", str(fresh_file)).refused("prompts.jsonl:37: bad JSON")


def test_a_template_that_refuses_the_roles_is_one_line(call, fresh_file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "strict"))
    (folder / "chat_template.jinja").write_text(STRICT)
    call("regen", str(fresh_file), f"target.id={folder}").refused("the target's chat template refuses it", "roles must alternate")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("capture", ["15 of 15 prompts have no answer yet; run regen first"]),
        ("train", ["15 of 15 prompts have no answer yet; run regen first"]),
        ("evaluate", ["; run ", " first"]),
        ("export", ["holds no checkpoint; run train first"]),
        ("check", ["15 of 15 prompts have no answer yet; run regen first"]),
    ],
)
def test_a_stage_without_its_input_names_the_stage_to_run(call, fresh_file: Path, command: str, parts: list[str]) -> None:
    call(command, str(fresh_file)).refused(*parts)


def test_train_without_features_names_capture(call, run_file: Path) -> None:
    call("train", str(run_file)).refused("features")


def test_a_damaged_shard_is_one_line_and_no_checkpoint_is_made(call, run_file: Path) -> None:
    assert call("capture", str(run_file)).code == 0
    root = run_file.parent / "runs" / "pilot"
    shard = root / "features" / "train-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    call("train", str(run_file)).refused("train-00000.safetensors: damaged shard", "run capture again")
    assert not (root / "checkpoints").exists()


def test_a_drafter_of_another_vocabulary_is_one_line(call, run_file: Path, tiny_target, tiny_drafter, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_drafter(folder, tiny_drafter(tiny_target(), draft_tokens=2, layers=1, rank=16, bigram=0.0))
    said = call("evaluate", str(run_file), "--checkpoint", str(folder))
    said.refused("the target's vocabulary is 288 and the drafter's 64")
    assert not (run_file.parent / "runs" / "pilot" / "evaluate.json").exists()


@pytest.mark.parametrize("override", ["capture.taps=[0,3]", "export.dtype=float32"])
def test_a_drafter_that_could_not_be_exported_is_refused_before_it_is_trained(call, run_file: Path, override: str) -> None:
    said = call("pilot", str(run_file), override)
    assert said.code == 2 and said.err.splitlines()[-1].startswith("error: ") and "SGLang" in said.err
    assert not {"checkpoints", "metrics.jsonl"} & {path.name for path in (run_file.parent / "runs" / "pilot").iterdir()}


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(call, fresh_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = run_dir.os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 6:  # config.json, three files of the mix, settings.json, then the first group of answers
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(run_dir.os, "fsync", full)
    call("regen", str(fresh_file)).refused("train-00000.jsonl: could not be written (No space left on device)")
    mix = {f"prompts/{name}" for name in ("train.jsonl", "heldout.jsonl", "mix.json")}
    assert files(fresh_file.parent / "runs" / "pilot") == {"config.json", "timing.json", "regen/settings.json", *mix}


def test_a_failed_gate_ends_with_3_unless_it_is_allowed(call, run_file: Path) -> None:
    root = run_file.parent / "runs" / "pilot"
    path = root / "regen" / "train-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["digest"] = "0" * 16  # as if decoded and encoded again
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = call("regen", str(run_file))
    assert said.code == 3 and said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith("gate failed: gate 'token identity' failed: 1 of 15 rows") and '--allow "token identity"' in last
    (gate,) = json.loads((root / "gates.json").read_text())["gates"]
    assert (gate["name"], gate["passed"]) == ("token identity", False) and "allowed" not in gate
    assert call("regen", str(run_file), "--allow", "token identity").code == 0
    (gate,) = json.loads((root / "gates.json").read_text())["gates"]
    assert gate["passed"] is False and gate["allowed"] is True


def test_check_prints_every_gate_that_can_be_run(call, run_file: Path) -> None:
    said = call("check", str(run_file))
    assert said.code == 0
    for name in ("token identity", "tap identity", "distribution identity"):
        assert name in said.out
    names = [gate["name"] for gate in json.loads((run_file.parent / "runs" / "pilot" / "gates.json").read_text())["gates"]]
    assert names == ["token identity", "tap identity", "distribution identity"]


def test_report_works_on_a_run_that_has_hardly_begun(call, fresh_file: Path) -> None:
    assert call("regen", str(fresh_file), "prompts.max_tokens=8").code == 2
    said = call("report", str(fresh_file))
    page = fresh_file.parent / "runs" / "pilot" / "report.html"
    assert said.code == 0 and str(page) in said.err and "<html" in page.read_text()


def test_version_and_help(call) -> None:
    assert call("version") == Said(0, f"{__version__}\n", "")
    shown = call("--help")
    assert shown.code == 0
    for command in ("pilot", "regen", "capture", "train", "evaluate", "export", "check", "report", "plan"):
        assert command in shown.out


def test_an_unknown_command_or_option_is_a_usage_error(call, here: Path) -> None:
    for arguments in (["trian"], ["train", "--no-such-option"]):
        said = call(*arguments)
        assert said.code == 2 and arguments[-1] in said.err
    assert list(here.iterdir()) == []


def test_exit_codes_of_what_a_user_can_mend(capsys: pytest.CaptureFixture[str]) -> None:
    from specgraft.check.gates import GateError

    def raising(error: BaseException) -> Callable[[], Any]:
        def call() -> None:
            raise error

        return call

    assert guarded(lambda: None) == 0
    assert guarded(raising(ValueError("what to do"))) == 2
    assert guarded(raising(GateError("gate"))) == 3
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert guarded(raising(OSError(errno.ENOSPC, "No space left on device", "file"))) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: what to do" and said[1] == "gate failed: gate" and "goes on from here" in said[2]
    assert said[3].startswith("error: file: No space left on device")
    with pytest.raises(RuntimeError):
        guarded(raising(RuntimeError("a fault of ours is not hidden")))
    with pytest.raises(OSError):
        guarded(raising(OSError(errno.EIO, "I/O error")))
