"""The section about on-policy training: what the drafter was before and after, what its own proposals meet, where a step goes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from specgraft.config import DistillSection
from specgraft.report import pictures
from specgraft.report.blocks import Block, Paragraph, Picture, Section, Table
from specgraft.report.read import Found, at, is_number, numbers
from specgraft.report.sections import by_step
from specgraft.report.text import number
from specgraft.run_dir import RunDir, read_json

TITLE = "On-policy training"
SPLIT = ("sample", "score", "learn")


def origin(run: Found) -> str:
    """Where the supervised slots of the run came from; "references" where that is not known."""
    try:
        return DistillSection.model_validate(at(run.config, "distill")).origin
    except ValueError:
        return "references"


def on_policy(run: Found) -> Section:
    """Empty for runs that learn from the answers alone."""
    rows = [row for row in by_step(run, "train") if is_number(row.get("slots")) and row["slots"]]
    if not rows:
        return Section("on-policy", TITLE, missing="No training step has been logged yet: the train stage has not begun.")
    own = "its own branches on the answers" if origin(run) == "branches" else "its own draft-verify rounds"
    blocks: list[Block] = [Paragraph(f"The drafter learnt from {own} ({len(rows)} logged steps).")]
    return Section("on-policy", TITLE, [*blocks, *_served(run), *_teacher_forced(run), *_overlap(rows), *_split(rows)])


def _served(run: Found) -> list[Block]:
    """The decode loop's survival, of the checkpoint that the run started from and of its own."""
    source = at(run.config, "drafters", "warm_from")
    before, after = _evaluation(source), run.evaluation
    if not isinstance(after, dict) or before is None:
        lacks = "this run has not been evaluated yet" if before is not None else f"{source or 'the start'} has no evaluate.json"
        return [Paragraph(f"Measured survival before and after cannot be shown: {lacks}.")]
    blocks: list[Block] = []
    for key, title in (("t0", "T=0"), ("t1", "T=1")):
        pair = {"before": numbers(at(before, key, "survival")), "after": numbers(at(after, key, "survival"))}
        if not all(pair.values()):
            continue
        lengths = [at(part, key, "accept_length") for part in (before, after)]
        caption = (
            f"Measured in the decode loop at {title}: share of rounds in which at least the first j drafts were accepted. "
            f"Accept length {number(lengths[0], 3)} before, {number(lengths[1], 3)} after."
        )
        blocks.append(_survival(f"on-policy-{key}", pair, caption))
    if at(before, "settings", "evaluate") != at(after, "settings", "evaluate"):
        blocks.append(Paragraph("The two evaluations had different settings: compare them with care."))
    return blocks


def _evaluation(source: Any) -> dict[str, Any] | None:
    """evaluate.json of the run that `source` names: a run folder, or a checkpoint inside one."""
    if not isinstance(source, str) or not source:
        return None
    folder = Path(source).expanduser()
    for root in (folder, *folder.parents[:2]):
        path = RunDir(root).evaluation
        if path.is_file():
            try:
                return read_json(path)
            except ValueError:
                return None
    return None


def _teacher_forced(run: Found) -> list[Block]:
    rows = [row for row in by_step(run, "validate") if numbers(row.get("alpha_survival"))]
    if len(rows) < 2 or rows[0].get("step") != 0:
        return [Paragraph("Teacher-forced survival before the first step was not logged.")]
    pair = {"before": numbers(rows[0]["alpha_survival"]), "after": numbers(rows[-1]["alpha_survival"])}
    caption = (
        "Analytic survival on held-out text, teacher-forced, temperature 1: mean product of the overlaps up to position j. "
        f"Before the first step and at step {rows[-1]['step']:,.0f}; a surrogate, not the measured share above."
    )
    return [_survival("on-policy-analytic", pair, caption)]


def _survival(name: str, pair: dict[str, list[float]], caption: str) -> Picture:
    depth = max(len(values) for values in pair.values())
    table = Table(
        ("position", *pair, "change"),
        [
            (str(j + 1), *(number(values[j] if j < len(values) else None, 4) for values in pair.values()), _change(pair, j))
            for j in range(depth)
        ],
        numeric=(1, 2, 3),
    )
    return Picture(pictures.paired(name, pair, f"Survival by position. {caption}"), caption, table)


def _change(pair: dict[str, list[float]], place: int) -> str:
    values = [values[place] for values in pair.values() if place < len(values)]
    return f"{values[1] - values[0]:+.4f}" if len(values) == 2 and all(map(math.isfinite, values)) else ""


def _overlap(rows: list[dict[str, Any]]) -> list[Block]:
    """Overlap by position over training, and what it makes of a round."""
    depth = max((len(numbers(row.get("alpha"))) for row in rows), default=0)
    curves = {
        f"{j + 1}": [(float(row["step"]), numbers(row["alpha"])[j]) for row in rows if len(numbers(row.get("alpha"))) > j]
        for j in range(depth)
    }
    if not curves:
        return [Paragraph("Overlaps were not logged.")]
    caption = (
        "Overlap with the target, sum of min(p, q), by draft position behind the drafter's own tokens; one line a position, smoothed. "
        f"Last: {' '.join(f'{curve[-1][1]:.2f}' for curve in curves.values())}."
    )
    blocks: list[Block] = [Picture(pictures.lines("on-policy-overlap", curves, "overlap", f"Overlap by position over training. {caption}"), caption)]
    estimates = [(row["step"], row["branch_accept_length"]) for row in rows if is_number(row.get("branch_accept_length"))]
    if estimates:
        first, last = (sum(v for _, v in part) / len(part) for part in (estimates[: max(1, len(estimates) // 10)], estimates[-max(1, len(estimates) // 10) :]))
        blocks.append(
            Paragraph(
                f"Accept length on these proposals, mean of the first and of the last tenth of the steps: {first:.3f} and {last:.3f}. "
                "Anchors are uniform, so that it is no forecast of the decode loop's."
            )
        )
    return blocks


def _split(rows: list[dict[str, Any]]) -> list[Block]:
    seconds = {part: [row[f"{part}_seconds"] for row in rows if is_number(row.get(f"{part}_seconds"))] for part in SPLIT}
    if not all(seconds.values()):
        return [Paragraph("Seconds of sampling, scoring and learning were not logged.")]
    mean = {part: sum(values) / len(values) for part, values in seconds.items()}
    whole = sum(mean.values())
    slots = sum(row["slots"] for row in rows) / len(rows)
    caption = (
        f"Mean time of a step, {1000 * whole:,.0f} ms for {slots:,.0f} supervised tokens: {slots / whole:,.0f} a second, of which "
        + ", ".join(f"{part} {value / whole:.0%}" for part, value in mean.items()) + "."
    )  # fmt: skip
    svg = pictures.step_times([("a step", {part: 1000 * value for part, value in mean.items()})], {}, f"Where a step goes. {caption}", "on-policy-step")
    return [Picture(svg, caption)]
