"""`specgraft plan run`: sums by hand, what is not measured is asked for, and a run's own measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specgraft.config import RunConfig
from specgraft.plan.budget import Budget
from specgraft.plan.cli import app
from specgraft.plan.units import Units, given, over, units_of
from specgraft.records import Conversation

RECIPE = Path(__file__).parents[2] / "recipes" / "solar_open2.toml"
runner = CliRunner()
UNITS: dict[str, float] = {
    "conversation_tokens": 50, "answer_tokens": 30, "answer_tokens_per_second": 10, "producer_tokens_per_second": 100,
    "rank_tokens_per_second": 20, "producer_gpus": 4,
}  # fmt: skip
TOKEN = 605  # 3 states of 100 in two bytes, four of the id, one of the mask


def config_of(medium: str = "memory", servers: int = 2, **stream: Any) -> RunConfig:
    """1,000 conversations, 40 steps of 50: two epochs."""
    named = [f"http://127.0.0.1:{port}" for port in range(1, servers + 1)]
    return RunConfig.model_validate({
        "target": {"id": "far/away"}, "prompts": {"train": 1000, "held_out": 100}, "regen": {"servers": named},
        "capture": {"taps": [1, 3], "servers": named}, "stream": {"medium": medium, **stream}, "train": {"steps": 40, "rows": 50, "max_length": 64},
    })  # fmt: skip


def budget(config: RunConfig, ranks: int = 5, **units: float) -> dict[str, float | None]:
    return {line.key: line.value for line in Budget(config, given(**(units or UNITS)), hidden=100, ranks=ranks).lines()}


def test_servers_and_nothing_written() -> None:
    found = budget(config_of())  # 2 x 100 tokens a second against 5 x 20: the trainer is slower
    assert found["epochs"] == 2 and found["bytes_per_token"] == TOKEN and found["storage"] == 0
    assert found["storage_if_written"] == 1100 * 50 * TOKEN + 1100 * 250 + 2500
    assert found["network_bytes"] == (2 * 1000 + 16) * 50 * TOKEN and found["network_bytes_per_second"] == 100 * TOKEN
    assert found["answer_total"] == 33_000 and found["answer_seconds"] == 1650 and found["answer_gpu_hours"] == pytest.approx(3300 * 4 / 3600)
    assert found["prefill_total"] == found["trained_total"] == 100_000
    assert found["prefill_seconds"] == 500 and found["trained_seconds"] == found["seconds"] == 1000
    assert found["producers"] == 1 and found["stall_share"] == 0
    assert found["trainer_gpu_hours"] == pytest.approx(5 * 1000 / 3600) and found["producer_gpu_hours"] == pytest.approx(2 * 4 * 1000 / 3600)


def test_a_trainer_faster_than_its_producers_waits() -> None:
    found = budget(config_of(), **{**UNITS, "rank_tokens_per_second": 80.0})  # 200 against 400
    assert found["producers"] == 4 and found["stall_share"] == 0.5 and found["seconds"] == 500
    assert found["network_bytes_per_second"] == 200 * TOKEN


def test_what_is_kept_is_made_once_and_read_afterwards() -> None:
    found = budget(config_of("hybrid"))  # one epoch of 500 s beside 250 s of producers, then one from shards
    assert found["storage"] and "storage_if_written" not in found
    assert found["prefill_total"] == 50_000 and found["read"] == 50_000 * TOKEN
    assert found["seconds"] == 1000 and found["producer_gpu_hours"] == pytest.approx(2 * 4 * 500 / 3600)
    disk = budget(config_of("disk"))  # first all of the one, then all of the other
    assert disk["seconds"] == 250 + 1000 and disk["read"] == 100_000 * TOKEN and "stall_share" not in disk


def test_held_out_rows_travel_too() -> None:
    """Of every validation, once where they are kept, all of them where capture makes them."""

    def rows(medium: str, **sections: Any) -> float:
        data = config_of(medium).model_dump() | sections
        sent = budget(RunConfig.model_validate(data))["network_bytes"]
        assert sent is not None
        return sent / (50 * TOKEN)

    often = config_of().train.model_dump() | {"validate_every": 16, "validate_rows": 70}  # behind 16, 32 and the last of 40
    assert rows("memory", train=often) == 2 * 1000 + 3 * 70
    assert rows("memory", train=often, distill={"preset": "specopd"}) == 2 * 1000 + 4 * 70  # and before the first
    assert rows("memory", train=often | {"validate_rows": 500}) == 2 * 1000 + 3 * 100
    assert rows("hybrid", train=often) == 1000 + 70 and rows("disk", train=often) == 1000 + 100


def test_one_process_sends_nothing_and_actors_say_their_own_gpus() -> None:
    found = budget(config_of(servers=0))
    assert found["network"] == 0 and found["seconds"] == 200 + 1000  # each rank makes its own rows
    actors = budget(config_of("ray", servers=0, producers=3, gpus=2.0))
    assert actors["producer_gpu_hours"] == pytest.approx(3 * 2 * 1000 / 3600)


def test_what_nobody_measured_is_asked_for_and_not_made_up() -> None:
    lines = {line.key: line for line in Budget(config_of(), Units(), hidden=100).lines()}
    assert lines["network_bytes"].text == "needs --conversation-tokens"
    assert lines["seconds"].text == "needs --conversation-tokens --producer-tokens-per-second --rank-tokens-per-second"
    assert all(line.value is None for key, line in lines.items() if key not in {"conversations", "epochs", "bytes_per_token", "storage"})


def test_units_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"target": {"id": "near"}}))
    (tmp_path / "timing.json").write_text(json.dumps({"regen": 2.0, "capture": 5.0}))
    (tmp_path / "regen").mkdir()
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "manifest.json").write_text("{}")
    row = Conversation("a", "f", "en", "chat", "train", [1] * 10, [False] * 6 + [True] * 4, 6, 0.0, 1.0, 0, "stop", "")
    kept = [asdict(one) for one in (row, replace(row, prompt_id="b", input_ids=[1] * 20, loss_mask=[False] * 10 + [True] * 10))]
    (tmp_path / "regen" / "train-0000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    steps = [{"kind": "train", "step": n, "tokens": 100, "seconds": 9.0 if n == 0 else 2.0, "stall_seconds": 1.0} for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    found = units_of(tmp_path, config_of(), ranks=2)
    assert found.conversation_tokens and found.conversation_tokens.value == 15 and "another target (near)" in found.conversation_tokens.source
    assert found.answer_tokens and found.answer_tokens.value == 7
    assert found.answer_tokens_per_second and found.answer_tokens_per_second.value == 7
    assert found.producer_tokens_per_second and found.producer_tokens_per_second.value == 6
    assert found.rank_tokens_per_second and found.rank_tokens_per_second.value == 25  # without the first step, and without the waiting
    assert over(given(answer_tokens=3.0), found).answer_tokens == given(answer_tokens=3.0).answer_tokens


def test_the_recipe_on_the_command_line_loads_no_torch(tmp_path: Path) -> None:
    out = tmp_path / "budget.json"
    program = f"""
import sys
from specgraft import cli
sys.argv = ["specgraft", "plan", "run", {str(RECIPE)!r}, "--hidden", "4096", "--ranks", "8", "--conversation-tokens", "1000", "--json", {str(out)!r}]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"COLUMNS": "200", "PATH": ""})
    assert done.returncode == 0, done.stderr
    values = {row["key"]: row["value"] for row in json.loads(out.read_text())["lines"]}
    assert values["conversations"] == 500_000 and values["epochs"] == 2
    assert values["bytes_per_token"] == 6 * 4096 * 2 + 5 and values["network_bytes"] == (1e9 + 32 * 64 * 1000) * 49_157
    assert "needs --conversation-tokens" not in done.stdout and "--rank-tokens-per-second" in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "is no folder here: give --hidden"),
        (["--hidden", "4096", "--ranks", "7"], "--ranks 7: train.rows=64 is no multiple of it"),
        (["--hidden", "4096", "--answer-tokens", "0"], "--answer-tokens 0: give a number above 0, as measured"),
        (["--hidden", "4096", "--from", "no-such-folder"], "missing; run the stage that writes it"),
    ],
)
def test_budget_errors_are_one_line(args: list[str], line: str) -> None:
    done = runner.invoke(app, ["run", str(RECIPE), *args])
    assert done.exit_code == 2 and line in done.stderr and done.stderr.count("\n") == 1
