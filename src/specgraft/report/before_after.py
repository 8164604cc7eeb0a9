"""Survival by position before and after on-policy training, for its section.

Three kinds, each in a picture of its own: measured in decoding, analytic (product of overlaps), and counted on text (algorithms.md 1.3).
"""

from __future__ import annotations

import math
from typing import Any

from specgraft.report import onpolicy_pictures as pictures
from specgraft.report.blocks import Block, Picture, Table
from specgraft.report.headline import TEMPERATURES
from specgraft.report.onpolicy_pictures import BeforeAfter
from specgraft.report.read import Found, at, is_number, numbers
from specgraft.report.sections import by_step
from specgraft.report.text import MISSING, number, plain

COMPARED = ("target", "dtype", "draft_tokens", "prompts", "sampled_prompts", "max_new_tokens", "seed")  # settings of an evaluation

Part = tuple[list[Block], str]  # what is shown, and what is missing


def measured(run: Found) -> Part:
    """The decode loop's survival, of the drafter that the run started from and of its own."""
    start = run.start
    lacks = []
    if start is None:
        lacks.append("measured survival before, as the run started from no other drafter.")
    elif start.missing:
        lacks.append(f"measured survival before ({start.name}: {start.missing}).")
    if not run.evaluation:
        lacks.append("measured survival after (the evaluate stage has not finished).")
    before = start.evaluation if start else None
    panels: dict[str, BeforeAfter] = {}
    said = []
    for key, temperature in TEMPERATURES:
        both = (numbers(at(before, key, "survival")), numbers(at(run.evaluation, key, "survival")))
        if any(both):
            panels[f"T={temperature}"] = both
            said.append(f"T={temperature} {_lengths(at(before, key, 'accept_length'), at(run.evaluation, key, 'accept_length'))}")
    if not panels:
        return [], " ".join(lacks)
    caption = (
        "Measured in decoding: share of rounds that accept at least this many drafts. "
        f"Accept length, bonus included: {'; '.join(said)}.{_unlike(run)}"
    )
    svg = pictures.before_after("on-policy-measured", "survival, measured", panels, f"Measured survival by position. {_said(panels)}")
    return [Picture(svg, caption, _table(panels))], " ".join(lacks)


def _lengths(before: Any, after: Any) -> str:
    if not (is_number(before) and is_number(after)):
        return f"{number(before, 3)} before, {number(after, 3)} after" if is_number(before) or is_number(after) else MISSING
    return f"{before:.3f} before, {after:.3f} after ({100 * (after / before - 1):+.1f} %)" if before > 0 else MISSING


def _unlike(run: Found) -> str:
    """A warning where the two evaluations are not of the same thing."""
    if run.start is None or run.start.evaluation is None or run.evaluation is None:
        return ""
    sides = (run.start.evaluation, run.evaluation)
    unlike = [
        f"{key} {plain(values[0])} before, {plain(values[1])} after"
        for key in COMPARED
        if (values := [at(side, "settings", key) for side in sides])[0] != values[1]
    ]
    if run.start.config and run.config and at(run.start.config, "prompts") != at(run.config, "prompts"):
        unlike.append("their [prompts] differ")
    return f" Not the same measurement: {'; '.join(unlike)}." if unlike else ""


def teacher_forced(run: Found) -> list[Part]:
    """Analytic survival and counted hits on held-out answers, before the first update and at the last validation."""
    rows = by_step(run, "validate")
    first, last = next((row for row in rows if row["step"] == 0), {}), rows[-1] if rows and rows[-1]["step"] > 0 else {}
    lacks = [] if first else ["teacher-forced survival before (no validation was logged before the first update)."]
    lacks += [] if last else ["teacher-forced survival after (training has not come to a validation)."]
    kinds = (
        ("alpha_survival", "analytic", "Analytic, teacher-forced: mean over anchors of the product of the overlaps up to this position"),
        ("survival", "counted", "Counted, teacher-forced: share of anchors whose likeliest drafts are the answer's tokens up to this position"),
    )
    when = ", ".join(f"{name} at step {row['step']:,.0f}" for name, row in (("before", first), ("after", last)) if row)
    when += "".join(f"; answers: {row['answers']}" for row in (last or first,) if row.get("answers"))
    found: list[Part] = []
    for key, name, what in kinds:
        both = (numbers(first.get(key)), numbers(last.get(key)))
        if not any(both):
            continue
        lengths = [1 + math.fsum(values) if values else None for values in both]
        caption = (
            f"{what}, on held-out answers ({when}). One plus their sum: {_lengths(*lengths)}. A surrogate at uniform anchors, not what decoding measures."
        )
        svg = pictures.before_after(f"on-policy-{name}", f"survival, {name}", {"": both}, f"{name.capitalize()} survival by position. {_said({'': both})}")
        found.append(([Picture(svg, caption, _table({"": both}))], ""))
    return [*found, ([], " ".join(lacks))]


def _said(panels: dict[str, BeforeAfter]) -> str:
    return "; ".join(
        f"{title} {name}: ".lstrip() + " ".join(number(value, 3) for value in values)
        for title, both in panels.items()
        for name, values in zip(("before", "after"), both, strict=True)
        if values
    )


def _table(panels: dict[str, BeforeAfter]) -> Table:
    depth = max(len(values) for both in panels.values() for values in both)
    columns = ["position"]
    for title in panels:
        columns += [f"{name}, {title}" if title else name for name in ("before", "after")] + ["change"]
    rows = []
    for slot in range(depth):
        row = [str(slot + 1)]
        for before, after in panels.values():
            old, new = (values[slot] if slot < len(values) else math.nan for values in (before, after))
            row += [number(value, 3) if math.isfinite(value) else "–" for value in (old, new)]
            row.append(f"{new - old:+.3f}" if math.isfinite(new - old) else "–")
        rows.append(row)
    return Table(columns, rows, numeric=tuple(range(1, len(columns))), folded="the numbers")
