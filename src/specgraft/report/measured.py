"""The sections made of `evaluate.json`: what decoding with the drafter really did."""

from __future__ import annotations

import math
from typing import Any

from specgraft.plan import breakeven as cost
from specgraft.report import pictures
from specgraft.report.blocks import Block, Example, Legend, Paragraph, Picture, Piece, Section, Table
from specgraft.report.headline import TEMPERATURES, conditions, evaluation_dtype, speed_dtype
from specgraft.report.read import Found, at, is_number, numbers
from specgraft.report.text import count, number, percent, shortened

NOT_EVALUATED = "Not measured yet: the evaluate stage has not finished."
PROMPT_SHOWN = 700  # characters
EXAMPLES = 3


def by_group(run: Found) -> Section:
    title = "Accept length by domain and language"
    blocks: list[Block] = []
    for key, what in (("by_domain", "domain"), ("by_language", "language")):
        bars = [
            pictures.Bars(f"T={temperature}", values)
            for name, temperature in TEMPERATURES
            if (values := _groups(at(run.evaluation, name, key)))
        ]
        if not bars:
            continue
        names = list(dict.fromkeys(group for part in bars for group in part.values))
        rows = [(group, *(_cell(part.values.get(group)) for part in bars)) for group in names]
        table = Table(
            (what, *(part.label for part in bars)), rows, numeric=tuple(range(1, len(bars) + 1)), folded="the numbers"
        )
        dtype = evaluation_dtype(run)
        caption = (
            f"By {what}; request mean, n requests, {conditions(run, 0, dtype).replace('T=0', _temperatures(bars))}."
        )
        said = "; ".join(f"{row[0]} " + ", ".join(row[1:]) for row in rows)
        blocks.append(Picture(pictures.groups(what, bars, f"Accept length by {what}: {said}"), caption, table))
    if not blocks:
        return Section("groups", title, missing=NOT_EVALUATED)
    return Section("groups", title, blocks)


def _temperatures(bars: list[pictures.Bars]) -> str:
    return " and ".join(part.label for part in bars)


def _groups(value: Any) -> dict[str, tuple[float, int]]:
    if not isinstance(value, dict):
        return {}
    return {
        str(group): (float(part["accept_length"]), int(part.get("requests") or 0))
        for group, part in value.items()
        if is_number(at(part, "accept_length"))
    }


def _cell(found: tuple[float, int] | None) -> str:
    return f"{found[0]:.2f} (n={found[1]})" if found else "none"


def positions(run: Found) -> Section:
    title = "Acceptance by draft position"
    series, columns = {}, []
    for name, temperature in TEMPERATURES:
        both = (numbers(at(run.evaluation, name, "survival")), numbers(at(run.evaluation, name, "conditional")))
        if both[0]:
            series[f"T={temperature}"] = both
            columns += [(f"survival, T={temperature}", both[0]), (f"conditional, T={temperature}", both[1])]
    if not series:
        return Section("positions", title, missing=NOT_EVALUATED)
    depth = max(len(values) for _, values in columns)
    rows = [
        (str(slot + 1), *(number(values[slot] if slot < len(values) else None, 3) for _, values in columns))
        for slot in range(depth)
    ]
    table = Table(
        ("position", *(name for name, _ in columns)),
        rows,
        numeric=tuple(range(1, len(columns) + 1)),
        folded="the numbers",
    )
    dtype = evaluation_dtype(run)
    caption = (
        "Survival: share of rounds that accept at least this many drafts. Conditional: share accepted where every "
        f"earlier draft was. Measured in decoding{', ' + str(dtype) if dtype else ''}."
    )
    said = "; ".join(f"{name}: " + " ".join(number(value, 3) for value in values) for name, values in columns)
    picture = Picture(pictures.positions(series, f"Acceptance by draft position. {said}"), caption, table)
    return Section("positions", title, [picture])


def confidence(run: Found) -> Section:
    title = "Confidence"
    part = at(run.evaluation, "confidence")
    if not isinstance(part, dict) or not part:
        return Section("confidence", title, missing="The confidence head has not been measured yet.")
    bins = [
        (float(row["predicted"]), float(row["accepted"]), int(row["count"]))
        for row in part.get("bins") or []
        if is_number(at(row, "predicted")) and is_number(at(row, "accepted")) and is_number(at(row, "count"))
        if row["count"] > 0
    ]
    heat = part.get("temperature")
    heat = f"T={heat:g}, " if is_number(heat) else ""
    scores = f"{heat}ECE {number(part.get('ece'), 3)}, AUC {number(part.get('auc'), 3)}"
    caption = f"{scores}, {count(sum(row[2] for row in bins))} drafts. On the dotted line the head is right on average."
    blocks: list[Block] = []
    if bins:
        said = "; ".join(f"predicted {row[0]:.2f} accepted {row[1]:.2f}, {row[2]} drafts" for row in bins)
        rows = [(f"{row[0]:.3f}", f"{row[1]:.3f}", count(row[2])) for row in bins]
        table = Table(("predicted", "accepted", "drafts"), rows, numeric=(0, 1, 2), folded="the numbers")
        blocks.append(
            Picture(pictures.reliability(bins, f"Reliability of the confidence head. {said}"), caption, table)
        )
    else:
        blocks.append(Paragraph(scores))
    ece, auc = numbers(part.get("ece_by_slot")), numbers(part.get("auc_by_slot"))
    if ece or auc:
        depth = max(len(ece), len(auc))
        rows = [(str(slot + 1), _nth(ece, slot), _nth(auc, slot)) for slot in range(depth)]
        blocks.append(Table(("position", "ECE", "AUC"), rows, numeric=(1, 2), folded="by draft position"))
    return Section("confidence", title, blocks)


def _nth(values: list[float], index: int) -> str:
    return number(values[index] if index < len(values) else None, 3)


def step_times(run: Found) -> Section:
    title = "Where a step goes"
    rows: list[tuple[str, dict[str, float]]] = []
    marks: dict[str, float] = {}
    table = []
    for key, temperature in TEMPERATURES:
        part = at(run.evaluation, "speed", key)
        times = {name: at(part, f"{name}_ms") for name in ("draft", "verify", "rest")}
        kept = {name: float(value) for name, value in times.items() if is_number(value) and value >= 0}
        if not kept:
            continue
        label = f"drafter, T={temperature}"
        rows.append((label, kept))
        bare, step, speed = at(part, "plain_step_ms"), at(part, "step_ms"), at(part, "tokens_per_second")
        if is_number(bare) and bare > 0:
            rows.append((f"plain, T={temperature}", {"plain step": float(bare)}))
            tau = speed * step / cost.MS if is_number(speed) and is_number(step) else math.nan
            if tau >= 1:
                marks[label] = cost.largest_step_ms(tau, bare)
        table.append((f"T={temperature}", *(number(value, 1) for value in (*times.values(), step, bare))))
    if not rows:
        return Section("steps", title, missing="No steps have been timed yet.")
    dtype = speed_dtype(run)
    caption = (
        f"Mean milliseconds of one round with the drafter, beside one plain step{', ' + str(dtype) if dtype else ''}. "
        "A round commits several tokens, so it may take longer: it pays while it ends left of the mark, which is "
        "the plain step times the tokens a round committed in the same run (bonus included)."
    )
    columns = ("ms", "draft", "verify", "rest", "step", "plain step")
    numeric = tuple(range(1, len(columns)))
    figures = Table(columns, table, numeric=numeric, folded="the numbers")
    said = "; ".join(
        f"{name}: " + ", ".join(f"{what} {value:.1f} ms" for what, value in times.items()) for name, times in rows
    )
    return Section("steps", title, [Picture(pictures.step_times(rows, marks, f"Step times. {said}"), caption, figures)])


def examples(run: Found) -> Section:
    title = "Generations"
    shown = at(run.evaluation, "examples")
    shown = [row for row in shown if isinstance(row, dict)] if isinstance(shown, list) else []
    if not shown:
        return Section("examples", title, missing="No generations are kept yet: the evaluate stage has not finished.")
    blocks: list[Block] = [Legend()]
    for row in shown[:EXAMPLES]:
        pieces = [
            Piece(str(at(piece, "text") or ""), str(at(piece, "kind") or "target"))
            for piece in (row.get("pieces") if isinstance(row.get("pieces"), list) else [])
        ]
        drafted = sum(len(piece.text) for piece in pieces if piece.source == "draft")
        total = sum(len(piece.text) for piece in pieces)
        note = f"accept length {number(row.get('accept_length'))}, bonus included"
        if total:
            note += f"; {percent(drafted / total, 0)} of the characters come from accepted drafts"
        what = ", ".join(str(row[key]) for key in ("domain", "language") if row.get(key))
        blocks.append(
            Example(
                title=f"{row.get('prompt_id', 'example')}{' · ' + what if what else ''}",
                note=note,
                language=str(row.get("language") or ""),
                prompt=shortened(str(row.get("prompt") or ""), PROMPT_SHOWN),
                pieces=pieces,
            )
        )
    return Section("examples", title, blocks)
