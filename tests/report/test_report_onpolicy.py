"""The on-policy section: there for runs that learn from their own proposals, whole, and unbroken where files are missing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from specgraft.report import onpolicy_pictures, pictures
from specgraft.report.blocks import Paragraph, Picture, Table
from specgraft.report.onpolicy import TITLE, on_policy
from specgraft.report.read import found
from specgraft.report.sections import what_was_run
from specgraft.report.stage import page
from specgraft.run_dir import RunDir, read_json, write_json

G = 7
PICTURES = ["measured", "analytic", "counted", "overlap", "tempo", "estimate"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but not laid out and written."""

    def drawn(name: str, alt: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
        draw(Figure())
        return f'<svg id="{name}"><title>{escape(alt)}</title></svg>'

    for module in (pictures, onpolicy_pictures):
        monkeypatch.setattr(module, "drawn", drawn)


def change(run: RunDir, section: str, **values: Any) -> None:
    config = read_json(run.config)
    config[section] |= values
    write_json(run.config, config)


def write_rows(run: RunDir, rows: list[dict[str, Any]]) -> None:
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_row(step: int) -> dict[str, Any]:
    slow = 10 if step == 1 else 1
    return {
        "kind": "train", "step": step, "loss": 1.0, "slots": 1500, "seconds": 2.0 * slow, "lr": 1e-4, "grad_norm": 1.0,
        "alpha": [0.5 - 0.04 * slot + 0.001 * step for slot in range(G)], "branch_accept_length": 1.8 + 0.005 * step,
        "sample_seconds": 0.1 * slow, "score_seconds": 0.6 * slow, "learn_seconds": 1.3 * slow,
    }  # fmt: skip


def validate_row(step: int, shift: float) -> dict[str, Any]:
    kinds = {"alpha_survival": 0.5 + shift, "survival": 0.3 + shift}
    return {"kind": "validate", "step": step, "accept_length": 2.0} | {
        name: [value**slot for slot in range(1, G + 1)] for name, value in kinds.items()
    }


def learnt(run: RunDir, **distill: Any) -> RunDir:
    """Turns a filled run into one that learnt from its own proposals."""
    change(run, "distill", **{"preset": "specopd", **distill})
    write_rows(run, [validate_row(0, 0.0), *(train_row(step) for step in range(1, 41)), validate_row(40, 0.05)])
    return run


def started_from(run: RunDir, tmp_path: Path, evaluated: str = "step-000040", **settings: Any) -> RunDir:
    """Gives a run one to go on from, with a checkpoint of step 40; `evaluated` is the one its evaluation is of."""
    first = RunDir(tmp_path / "first").create()
    (first.checkpoints / "step-000040").mkdir(parents=True)
    value = read_json(run.evaluation)
    value["t0"]["survival"][6] = 0.001
    value["t0"]["accept_length"] = 1.6
    value["settings"] |= {"checkpoint": str(first.checkpoints / evaluated), **settings}
    write_json(first.evaluation, value)
    change(run, "drafters", warm_from=str(first.root))
    return first


def said(run: RunDir) -> str:
    section = on_policy(found(run))
    assert section is not None
    parts = [section.lead]
    for block in section.blocks:
        assert isinstance(block, Picture | Paragraph)
        parts.append(block.text if isinstance(block, Paragraph) else block.caption)
        if isinstance(block, Picture) and block.table:
            parts += [" ".join(row) for row in block.table.rows]
    return "\n".join(parts)


def names(run: RunDir) -> list[str]:
    section = on_policy(found(run))
    assert section is not None
    return [block.svg.split('"')[1].removeprefix("on-policy-") for block in section.blocks if isinstance(block, Picture)]


@pytest.mark.usefixtures("quick")
def test_only_runs_on_their_own_proposals_have_it(full_run: RunDir) -> None:
    assert TITLE not in page(found(full_run))
    assert TITLE in page(found(learnt(full_run)))
    assert TITLE in page(found(learnt(full_run, preset="draft_opd")))
    assert TITLE not in page(found(learnt(full_run, slots="references", e2e_tv=1.0)))


@pytest.mark.usefixtures("quick")
def test_what_it_says(full_run: RunDir, tmp_path: Path) -> None:
    started_from(learnt(full_run), tmp_path)
    text = said(full_run)
    assert names(full_run) == PICTURES and "Missing" not in text and "Not the same measurement" not in text
    for part in (
        "its own branches, scored by the target (SpecOPD)", "It started from first.",
        "Measured in decoding", "T=0 1.600 before, 1.720 after (+7.5 %); T=1 1.612 before, 1.612 after (+0.0 %)",
        "7 0.001 0.002 +0.001 0.002 0.002 +0.000",  # position; before, after, change at T=0 and at T=1
        "Analytic, teacher-forced", "(before at step 0, after at step 40)", "\n1 0.500 0.550 +0.050",
        "Counted, teacher-forced", "\n1 0.300 0.350 +0.050",
        "\n1 0.502 0.538 +0.036",  # overlap, mean of the first and of the last tenth
        "750 supervised tokens per second: 1,500 a step of 2,000 ms", "sample 100 ms, 5.0 %; score 600 ms, 30.0 %; learn 1,300 ms, 65.0 %",
        "First tenth of the steps 1.812, last 1.993",
    ):  # fmt: skip
        assert part in text, part


def test_real_pictures(full_run: RunDir, tmp_path: Path) -> None:
    started_from(learnt(full_run), tmp_path)
    section = on_policy(found(full_run))
    assert section is not None
    for block in section.blocks:
        assert isinstance(block, Picture)
        tree = ElementTree.fromstring(block.svg)
        assert len(tree.get("aria-label") or "") > 60 and "<text" in block.svg and "#0a0b" not in block.svg


@pytest.mark.usefixtures("quick")
def test_the_three_kinds_of_survival_share_no_picture(full_run: RunDir, tmp_path: Path) -> None:
    started_from(learnt(full_run), tmp_path)
    section = on_policy(found(full_run))
    assert section is not None
    captions = [block.caption for block in section.blocks if isinstance(block, Picture)][:3]
    for caption, kind in zip(captions, ("Measured", "Analytic", "Counted"), strict=True):
        assert caption.startswith(kind) and sum(word in caption for word in ("Measured", "Analytic", "Counted")) == 1


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_inside_a_run_may_be_named(full_run: RunDir, tmp_path: Path) -> None:
    first = started_from(learnt(full_run), tmp_path)
    change(full_run, "drafters", warm_from=str(first.checkpoints / "step-000040"))
    assert "T=0 1.600 before" in said(full_run) and "It started from first/step-000040." in said(full_run)


@pytest.mark.usefixtures("quick")
def test_the_evaluation_of_another_checkpoint_is_no_before(full_run: RunDir, tmp_path: Path) -> None:
    started_from(learnt(full_run), tmp_path, evaluated="step-000020")
    text = said(full_run)
    assert "first: it was evaluated at step-000020, not at step-000040" in text and "T=0 not measured before, 1.720 after" in text


@pytest.mark.usefixtures("quick")
def test_the_evaluation_of_a_run_around_it_is_no_before(full_run: RunDir, tmp_path: Path) -> None:
    """A run folder without evaluate.json, inside a folder that has one."""
    first = started_from(learnt(full_run), tmp_path)
    inner = RunDir(first.root / "onpolicy" / "start").create()
    change(full_run, "drafters", warm_from=str(inner.root))
    assert "measured survival before (start: it has no evaluate.json)" in said(full_run)


@pytest.mark.usefixtures("quick")
def test_evaluations_of_other_settings_are_named(full_run: RunDir, tmp_path: Path) -> None:
    started_from(learnt(full_run), tmp_path, prompts=8)
    assert "Not the same measurement: prompts 8 before, 100 after." in said(full_run)


@pytest.mark.usefixtures("quick")
def test_what_is_missing_is_named(full_run: RunDir) -> None:
    run = learnt(full_run, branch_temperature=0.8)
    full_run.evaluation.unlink()
    write_rows(run, [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2)])
    text = said(run)
    assert names(run) == []
    for part in (
        "measured survival before, as the run started from no other drafter", "measured survival after", "before the first update",
        "not come to a validation", "overlap by position", "supervised tokens per second", "the split of a step", "temperature 1 only",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.usefixtures("quick")
def test_rows_of_rollouts(full_run: RunDir) -> None:
    run = learnt(full_run, preset="draft_opd")
    write_rows(run, [train_row(step) for step in range(1, 4)])
    text = said(run)
    assert "draft-verify rounds (Draft-OPD)" in text and "of the step's own rounds, T=0" in text and "branches" not in text and "tempo" in names(run)
    write_rows(run, [{key: value for key, value in train_row(step).items() if key != "branch_accept_length"} for step in range(1, 4)])
    assert "accept length on its own proposals (no step has logged it)" in said(run)


@pytest.mark.usefixtures("quick")
def test_the_objective_says_what_it_is_learnt_on(full_run: RunDir) -> None:
    for preset, objective in (
        ("specopd", "on its own branches: e2e_tv 1"), ("draft_opd", "on its own rounds: kl 1, rkl 1"), ("e2e_tv", "e2e_tv 1"),
    ):  # fmt: skip
        rows = dict(row for block in what_was_run(found(learnt(full_run, preset=preset))).blocks if isinstance(block, Table) for row in block.rows)
        assert rows["objective"].startswith(objective)


@pytest.mark.parametrize("value", [None, "text", -1, [None], {"a": None}, float("nan")])
@pytest.mark.usefixtures("quick")
def test_any_part_of_a_row_may_be_anything(full_run: RunDir, tmp_path: Path, value: Any) -> None:
    first = started_from(learnt(full_run), tmp_path)
    for make in (train_row, lambda step: validate_row(step, 0.1)):
        for key in set(make(0)) - {"kind", "step"}:
            write_rows(full_run, [{**make(step), key: value} for step in (0, 1, 2)])
            assert on_policy(found(full_run)) is not None
    for key in ("settings", "t0", "t1"):
        write_json(first.evaluation, {**read_json(full_run.evaluation), key: value})
        assert on_policy(found(full_run)) is not None
    change(full_run, "drafters", warm_from=value)
    assert on_policy(found(full_run)) is not None


@pytest.mark.parametrize("lost", ["evaluation", "metrics"])
@pytest.mark.usefixtures("quick")
def test_a_missing_file_costs_a_sentence(full_run: RunDir, lost: str) -> None:
    getattr(learnt(full_run), lost).unlink()
    assert "could not be shown" not in page(found(full_run)) and "Missing" in said(full_run)


def test_names_of_lines_do_not_touch() -> None:
    assert onpolicy_pictures.shown_positions(7) == [1, 2, 3, 4, 5, 6, 7]
    assert onpolicy_pictures.shown_positions(64)[0] == 1 and onpolicy_pictures.shown_positions(64)[-1] == 64
    axes = Figure().subplots()
    onpolicy_pictures._name_ends(axes, [(0.5, 1), (0.5, 2), (0.1, 3), (0.1, 4), (0.1, 5)], 0.1, 0.9)
    places = [(text.get_text(), text.xy[1]) for text in axes.texts]
    assert [name for name, _ in places] == ["1", "2", "3", "4", "5"]
    gaps = [a[1] - b[1] for a, b in pairwise(places)]
    assert min(gaps) > 0.99 * onpolicy_pictures.LABEL * 0.8 and places[-1][1] >= 0.1
