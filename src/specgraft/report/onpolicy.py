"""The section about on-policy training: what the drafter was before and after, what its own proposals meet, where a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specgraft.config import DistillSection
from specgraft.report import onpolicy_pictures as pictures
from specgraft.report.before_after import Part, measured, teacher_forced
from specgraft.report.blocks import Block, Paragraph, Picture, Section, Table
from specgraft.report.pictures import Curve
from specgraft.report.read import Found, at, is_number, numbers
from specgraft.report.sections import by_step
from specgraft.report.text import count, percent, plain

TITLE = "On-policy training"
SPLIT = ("sample", "score", "learn")


def distilled(run: Found) -> DistillSection | None:
    """The run's objective; None where it is not known."""
    try:
        return DistillSection.model_validate(at(run.config, "distill"))
    except ValueError:  # a run of another version
        return None


def on_policy(run: Found) -> Section | None:
    """None for runs that learn from the answers alone, and for those of which it is not known."""
    options = distilled(run)
    if options is None or options.origin == "references":
        return None
    rows = by_step(run, "train")
    # the first step compiles and warms up: the means leave it out
    timed = [row for row in rows if row["step"] > 1] or rows
    parts = [measured(run), *teacher_forced(run), _overlap(rows), _tempo(rows, timed), _estimate(rows, options)]
    blocks: list[Block] = [block for shown, _ in parts for block in shown]
    missing = " ".join(lacks for _, lacks in parts if lacks)
    if missing:
        blocks.append(Paragraph(f"Missing: {missing}"))
    return Section("on-policy", TITLE, blocks, lead=_lead(run, options))


def _lead(run: Found, options: DistillSection) -> str:
    own = "its own draft-verify rounds (Draft-OPD)"
    if options.origin == "branches":
        anchors, many = at(run.config, "train", "anchors"), options.branches_per_anchor
        drawn = f"at up to {plain(anchors)} anchors an answer, {many} at each, temperature {plain(options.branch_temperature)}"
        own = f"its own branches, scored by the target (SpecOPD): {drawn}"
    start = f"It started from {run.start.name}." if run.start else "It started from no other drafter (drafters.warm_from is not set)."
    return f"The drafter learns from {own}. {start}"


def _overlap(rows: Sequence[dict[str, Any]]) -> Part:
    """Overlap with the target by position over training, where the drafter's own tokens lie before it."""
    found = [(float(row["step"]), numbers(row.get("alpha"))) for row in rows]
    depth = max((len(values) for _, values in found), default=0)
    curves = {
        slot + 1: curve
        for slot in range(depth)
        if (curve := [(step, values[slot]) for step, values in found if len(values) > slot and math.isfinite(values[slot])])
    }
    if not curves:
        return [], "overlap by position (no step has logged it)."
    shown = {position: curves[position] for position in pictures.shown_positions(depth) if position in curves}
    ends = {position: _ends(curve) for position, curve in curves.items()}
    table = Table(
        ("position", "first", "last", "change"),
        [(str(position), f"{old:.3f}", f"{new:.3f}", f"{new - old:+.3f}") for position, (old, new) in ends.items()],
        numeric=(1, 2, 3),
        folded="the numbers",
    )
    caption = (
        "Overlap with the target, sum of min(p, q), by draft position behind the drafter's own tokens; smoothed, each line named by its position. "
        "The numbers are means of the first and of the last tenth of the steps."
    )
    said = "; ".join(f"position {position}: {old:.3f} to {new:.3f}" for position, (old, new) in ends.items())
    return [Picture(pictures.overlaps(shown, f"Overlap by position over training. {said}"), caption, table)], ""


def _ends(curve: Curve) -> tuple[float, float]:
    """Mean of the first and of the last tenth of a curve."""
    size = max(1, len(curve) // 10)
    first, last = (math.fsum(value for _, value in part) / size for part in (curve[:size], curve[-size:]))
    return first, last


def _tempo(rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> Part:
    """Supervised tokens per second, and what a step's time goes into."""
    paced = [row for row in rows if is_number(row.get("slots")) and is_number(row.get("seconds")) and row["seconds"] > 0]
    rate: Curve = [(float(row["step"]), row["slots"] / row["seconds"]) for row in paced]
    split = [row for row in timed if all(is_number(row.get(f"{part}_seconds")) for part in SPLIT)]
    parts = {part: math.fsum(row[f"{part}_seconds"] for row in split) / len(split) for part in SPLIT} if split else {}
    whole = math.fsum(parts.values())
    lacks = [] if rate else ["supervised tokens per second (no step has logged them)."]
    if not whole > 0:
        parts = {}
        lacks.append("the split of a step into sample, score and learn (no step has logged it).")
    if not (rate or parts):
        return [], " ".join(lacks)
    said = []
    if kept := [row for row in paced if row in timed]:
        slots, seconds = (math.fsum(row[key] for row in kept) for key in ("slots", "seconds"))
        said.append(f"{count(slots / seconds)} supervised tokens per second: {count(slots / len(kept))} a step of {count(1000 * seconds / len(kept))} ms")
    shares = [f"{part} {count(1000 * value)} ms, {percent(value / whole)}" for part, value in parts.items()]
    said += [f"of a step {'; '.join(shares)}"] if parts else []
    caption = f"{'. '.join(text[0].upper() + text[1:] for text in said)}. Means without the first step; learn holds forward, backward and update."
    table = Table(
        ("part", "ms per step", "share"),
        [(part, count(1000 * value), percent(value / whole)) for part, value in parts.items()],
        numeric=(1, 2), folded="the numbers",
    ) if parts else None  # fmt: skip
    labels = {part: f"{part} {percent(value / whole, 0)}" for part, value in parts.items()}
    return [Picture(pictures.tempo(rate, parts, labels, f"Tempo of training. {caption}"), caption, table)], " ".join(lacks)


def _estimate(rows: Sequence[dict[str, Any]], options: DistillSection) -> Part:
    """What branches say of accept length (identity 5 of algorithms.md 1.2), or what rollouts have counted."""
    curve: Curve = [(float(row["step"]), float(row["branch_accept_length"])) for row in rows if is_number(row.get("branch_accept_length"))]
    if not curve:
        if options.origin == "branches" and options.branch_temperature != 1:
            return [], "the estimate of accept length, which holds for branches drawn at temperature 1 only."
        return [], "accept length on its own proposals (no step has logged it)."
    old, new = _ends(curve)
    tenths = f"pale as logged, strong smoothed. First tenth of the steps {old:.3f}, last {new:.3f}"
    if options.origin == "rollouts":
        label, title = "accept length, counted", "Accept length of own rounds"
        caption = f"Accept length of the step's own rounds, T=0, bonus included, counted; {tenths}. The prompts are the training ones."
    else:
        label, title = "accept length, estimated", "Accept length on own branches"
        caption = (
            "Accept length expected of a round at the step's anchors, T=1, bonus included, estimated without bias on the branches just drawn; "
            f"{tenths}. Anchors are uniform and from the training answers: no forecast of the decode loop's."
        )
    return [Picture(pictures.over_steps("on-policy-estimate", curve, label, f"{title}. {caption}"), caption)], ""
