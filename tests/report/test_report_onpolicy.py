"""The on-policy section: there for runs that learn from their own proposals, whole, and unbroken where files are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgraft.report.onpolicy import TITLE, on_policy
from specgraft.report.read import found
from specgraft.report.stage import page
from specgraft.run_dir import RunDir, read_json, write_json

G = 7


def learnt(run: RunDir, **distill: Any) -> RunDir:
    """Turns a filled run into one that went on from another."""
    config = read_json(run.config)
    config["distill"] |= {"preset": "specopd", **distill}
    write_json(run.config, config)
    rows = []
    for step in range(1, 41):
        rows.append(
            {
                "kind": "train", "step": step, "loss": 1.0, "slots": 1500, "seconds": 2.0, "lr": 1e-4, "grad_norm": 1.0,
                "alpha": [0.5 - 0.04 * j + 0.001 * step for j in range(G)], "branch_accept_length": 1.8 + 0.005 * step,
                "sample_seconds": 0.1, "score_seconds": 0.6, "learn_seconds": 1.3,
            }
        )  # fmt: skip
    for step, shift in ((0, 0.0), (40, 0.05)):
        rows.append({"kind": "validate", "step": step, "alpha_survival": [(0.5 + shift) ** j for j in range(1, G + 1)], "survival": [0.4] * G, "accept_length": 2.0})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return run


def started_from(run: RunDir, folder: Path) -> None:
    config = read_json(run.config)
    config["drafters"]["warm_from"] = str(folder)
    write_json(run.config, config)


def text(run: RunDir) -> str:
    section = on_policy(found(run))
    parts: list[str] = []
    for block in section.blocks:
        parts += [getattr(block, name) for name in ("text", "caption") if getattr(block, name, "")]
        table = getattr(block, "table", None)
        parts += [" ".join(row) for row in table.rows] if table else []
    return "\n".join(parts) + section.missing


def test_only_runs_on_their_own_proposals_have_it(full_run: RunDir) -> None:
    assert TITLE not in page(found(full_run))
    assert TITLE in page(found(learnt(full_run)))


def test_what_it_says(full_run: RunDir, tmp_path: Path) -> None:
    before = RunDir(tmp_path / "first").create()
    value = read_json(full_run.evaluation)
    value["t0"]["survival"][6] = 0.001
    write_json(before.evaluation, value)
    started_from(learnt(full_run), before.root / "checkpoints" / "step-000040")
    said = text(full_run)
    assert "its own branches" in said and "Measured in the decode loop at T=0" in said and "at T=1" in said
    assert "7 0.0010 0.0020 +0.0010" in said  # position, before, after, change
    assert "1 0.5000 0.5500 +0.0500" in said and "Analytic survival" in said  # the two are never mixed
    assert "750 a second" in said and "sample 5%" in said and "score 30%" in said and "learn 65%" in said
    assert "last tenth of the steps: 1.81" in said
    assert page(found(full_run)).count("on-policy-") >= 5


@pytest.mark.parametrize("lost", ["evaluation", "config", "metrics"])
def test_a_missing_file_costs_a_sentence(full_run: RunDir, lost: str) -> None:
    getattr(learnt(full_run), lost).unlink()
    assert "could not be shown" not in page(found(full_run))
    if lost == "evaluation":
        assert "cannot be shown" in text(full_run)
    if lost == "metrics":
        assert "No training step" in text(full_run)


def test_rows_of_an_older_run(full_run: RunDir) -> None:
    run = learnt(full_run, slots="rollouts", preset="draft_opd")
    run.metrics.write_text(json.dumps({"kind": "train", "step": 1, "loss": 1.0, "slots": 7}) + "\n", encoding="utf-8")
    said = text(run)
    assert "its own draft-verify rounds" in said and "Overlaps were not logged" in said and "Seconds of sampling" in said
