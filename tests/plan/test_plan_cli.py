"""`specgraft plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specgraft.plan.cli import app

runner = CliRunner()
BASE = ["breakeven", "--step-ms", "8.4", "--plain-tokens-per-second", "299.4"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_breakeven(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = runner.invoke(app, [*BASE, "--accept-length", "1.83", "--draft-tokens", "7", "--json", str(out)])
    assert done.exit_code == 0
    assert "2.515 tokens" in done.stdout and "slower than no draft" in done.stdout
    values = json.loads(out.read_text(encoding="utf-8"))["values"]
    assert values["tokens_per_second"] == pytest.approx(217.857, abs=0.001)
    assert values["speedup"] == pytest.approx(0.7277, abs=0.0001)
    assert values["break_even"] == pytest.approx(2.515, abs=0.001)


def test_step_alone_is_enough() -> None:
    done = runner.invoke(app, BASE)
    assert done.exit_code == 0 and "2.515" in done.stdout and "speedup" not in done.stdout


def test_step_can_be_implied() -> None:
    done = runner.invoke(
        app,
        [
            "breakeven",
            "--accept-length",
            "3.54",
            "--tokens-per-second",
            "425.8",
            "--plain-ms",
            "3.34",
            "--draft-tokens",
            "7",
        ],
    )
    assert done.exit_code == 0 and "8.314 ms" in done.stdout and "implied by the measured speed" in done.stdout


def test_best_g(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    args = ["breakeven", "--survival", "0.6,0.35,0.2,0.1", "--step-ms", "20", "--plain-ms", "12", "--slot-ms", "1.5"]
    done = runner.invoke(app, [*args, "--json", str(out)])
    assert done.exit_code == 0 and "this slot pays, best" in done.stdout
    found = json.loads(out.read_text(encoding="utf-8"))["choices"]
    assert [row["draft_tokens"] for row in found if row["best"]] == [3]


def test_out_of_reach() -> None:
    done = runner.invoke(app, ["breakeven", "--step-ms", "30", "--plain-ms", "10", "--draft-tokens", "1"])
    assert "out of reach: 1 draft tokens give at most 2" in done.stdout


def test_published(tmp_path: Path) -> None:
    out = tmp_path / "published.json"
    done = runner.invoke(app, ["breakeven", "--published", "--json", str(out)])
    assert done.exit_code == 0
    for text in ("421.43", "474.53", "217.86", "not derivable", "not reproduced", "inconsistent"):
        assert text in done.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["status"] == "reproduced"


def test_storage(tmp_path: Path) -> None:
    out = tmp_path / "storage.json"
    done = runner.invoke(app, ["storage", "--tokens", "1000000", "--hidden", "2560", "--json", str(out)])
    assert done.exit_code == 0 and "30.73 GB" in done.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["bytes"] == 30_725_000_000 + 2_500 * 250 + 16 * 2_500
    done = runner.invoke(app, ["storage", "--tokens", "1000", "--hidden", "64", "--dtype", "fp8"])
    assert done.exit_code == 0 and "408 B" in done.stdout and "413 B" in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["breakeven", "--step-ms", "0", "--plain-ms", "3"], "step ms must be a number above 0 (given: 0)"),
        (["breakeven", "--step-ms", "8"], "give one of --plain-ms and --plain-tokens-per-second"),
        (["breakeven", "--plain-ms", "8"], "give the step time, or a measured speed together with an accept length"),
        ([*BASE, "--plain-ms", "3"], "give one of --plain-ms and --plain-tokens-per-second"),
        ([*BASE, "--accept-length", "9", "--draft-tokens", "7"], "lies in [1, 8], bonus included (given: 9)"),
        ([*BASE, "--survival", "a,b"], "--survival 'a,b': write numbers with commas between"),
        ([*BASE, "--survival", "0.5,0.4", "--draft-tokens", "7"], "survival has 2 numbers for 7 draft tokens"),
        ([*BASE, "--slot-ms", "1"], "--slot-ms needs --survival"),
        (["storage", "--tokens", "0", "--hidden", "8"], "tokens must be at least 1 (given: 0)"),
        (["storage", "--tokens", "9"], "give --tokens and --hidden, or the folder of a run by --run"),
        (["storage", "--tokens", "9", "--run", "."], "give one of --run and --tokens"),
        (["storage", "--run", "no-such-folder"], "missing; run the stage that writes it"),
    ],
)
def test_errors_are_one_line(args: list[str], line: str) -> None:
    done = runner.invoke(app, args)
    assert done.exit_code == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
