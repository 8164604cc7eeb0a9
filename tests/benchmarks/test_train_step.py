"""The training-step benchmark: our own worker, and the numbers that the JSON promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "train_step.py"
HEADLINE = [f"{kind}_vs_{name}" for kind in ("speed", "memory") for name in ("speculators", "specforge", "automodel")]


def test_our_steps_are_measured_and_every_key_is_there(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    options = ["--shape", "tiny", "--only", "dspark", "--precision", "fp32", "--peers", "none", "--repeats", "2", "--json", str(out)]
    done = subprocess.run([sys.executable, str(BENCHMARK), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert all(found[key] is None for key in HEADLINE), "no peer took part, and the larger shape did not run"
    ours, naive = (next(row for row in found["rows"] if row["contender"] == name) for name in ("specgraft", "naive"))
    assert len(ours["steps"]) == 2 and ours["processor_s"] > 0 and ours["peak_mib"] > 0
    assert [step["supervised"] for step in ours["steps"]] == [step["supervised"] for step in naive["steps"]], "same seed, same anchors"
    for mine, whole in zip(ours["steps"], naive["steps"], strict=True):
        assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_a_contender_that_cannot_run_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import train_step

    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('no such package here')\n")
    fine = tmp_path / "fine.py"
    fine.write_text("import sys\nprint('{}')\nfor _ in sys.stdin: print('{\"processor_s\": 2.0, \"wall_s\": 1.0, \"peak_mib\": 10.0, \"supervised\": 6.0}', flush=True)\n")
    task = {**train_step.SHAPES["tiny"], "drafter": "dspark", "precision": "fp32", "threads": 1}
    contenders = [train_step.Contender(name, sys.executable, script) for name, script in (("specgraft", fine), ("specforge", broken))]
    rows = train_step.measure(contenders, task, 3)
    assert rows[0].rate == 3.0 and len(rows[0].steps) == 3
    assert "no such package here" in rows[1].failed and not rows[1].steps
    assert train_step.ratios(rows)["speed_vs_specforge"] is None
