"""The section about the run's text: the mix asked for and got, lengths, what was left out, two conversations with their masks."""

from __future__ import annotations

from typing import Any

from specgraft.report import data_pictures
from specgraft.report.blocks import Block, Masked, MaskLegend, Paragraph, Picture, Section, Stretch, Table
from specgraft.report.data_pictures import Quota
from specgraft.report.read import Found, at, is_number
from specgraft.report.text import count, percent, plain, shortened

TITLE = "Data"
CONVERSATIONS = 2
TEXT_SHOWN = 6000  # characters of a stretch, at most
SHOWN = 8  # rows of a list


def data(run: Found) -> Section:
    report = at(run.mix, "report")
    if not run.data and not report:
        return Section("data", TITLE, missing="No prompts are drawn and none are answered yet: the regen stage has not begun.")
    blocks: list[Block] = []
    try:
        blocks += [picture for picture in (_mix(run), _lengths(run)) if picture]
    except ImportError as error:
        blocks.append(Paragraph(f"{error.name} is not installed: pip install 'specgraft[report]'."))
    blocks += _left_out(report)
    conversations = _conversations(run)
    return Section("data", TITLE, [*blocks, *([MaskLegend()] if conversations else []), *conversations], lead=_lead(run))


def _lead(run: Found) -> str:
    found = run.data or {}
    if not found:
        return "Prompts are drawn, none are answered yet."
    tokens, whole = at(found, "tokens"), at(found, "tokens_with_prompts")
    share = f" of {count(whole)} ({percent(tokens / whole, 0)})" if is_number(tokens) and is_number(whole) and whole > 0 else ""
    parts = [f"{count(at(found, 'conversations'))} conversations, {count(tokens)} supervised tokens{share}"]
    if is_number(at(found, "turns")):
        parts.append(f"{count(found['turns'])} answers, {count(at(found, 'multi_turn'))} prompts with several")
    if ends := at(found, "end_reasons"):
        parts.append(f"ends: {plain(ends)}")
    if whose := at(found, "answers"):
        parts.append(f"answers: {plain(whose)}")
    return "; ".join(parts) + "."


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _mix(run: Found) -> Picture | None:
    """Train prompts by language and domain: as the mix was asked for and drawn, or else as they were answered."""
    report = at(run.mix, "report")
    cells = _rows(at(report, "splits", "train", "cells"))
    asked = bool(cells) and at(report, "weighed") is not False
    if not cells:
        cells = [{**row, "got": row.get("prompts")} for row in _rows(at(run.data, "cells")) if row.get("split") == "train"]
    quotas = {f"{part.name}": part for part in _sums(cells, ("language", "domain"), asked)}
    if not quotas:
        return None
    lengths = _sums(cells, ("length",), asked)
    if len(lengths) > 1:
        quotas |= {f"{part.name} characters": Quota(f"{part.name} characters", part.got, part.wanted) for part in lengths}
    said = "; ".join(f"{name} {part.got}" + (f" of {part.wanted}" if part.wanted is not None else "") for name, part in quotas.items())
    short = sum(part.got < part.wanted for part in quotas.values() if part.wanted is not None)
    caption = "Train prompts by language and domain"
    caption += f"; line: as asked for. {short or 'No'} quota{'s' if short > 1 else ''} fell short." if asked else "."
    svg = data_pictures.quotas(list(quotas.values()), f"{caption} {said}")
    columns = ("train", "asked for", "got") if asked else ("train", "prompts")
    rows = [(part.name, *([count(part.wanted)] if asked else []), count(part.got)) for part in quotas.values()]
    return Picture(svg, caption, Table(columns, rows, numeric=tuple(range(1, len(columns))), folded="the numbers"))


def _sums(cells: list[dict[str, Any]], axes: tuple[str, ...], asked: bool) -> list[Quota]:
    """Cells added up over the other axes, in the order in which they come."""
    sums: dict[str, list[int]] = {}
    for cell in cells:
        got, wanted = cell.get("got"), cell.get("wanted")
        if is_number(got) and all(axis in cell for axis in axes):
            both = sums.setdefault(" ".join(plain(cell[axis]) for axis in axes), [0, 0])
            both[0] += int(got)
            both[1] += int(wanted) if is_number(wanted) else 0
    return [Quota(name, got, wanted if asked else None) for name, (got, wanted) in sums.items()]


def _lengths(run: Found) -> Picture | None:
    held = at(run.data, "lengths")
    bands = {
        str(name): (int(part["rows"]), float(part["share"]) if is_number(part.get("share")) else None)
        for name, part in (held.items() if isinstance(held, dict) else ())
        if isinstance(part, dict) and is_number(part.get("rows"))
    }
    if not bands:
        return None
    said = "; ".join(f"{name} {rows}" + (f", {percent(share, 0)} supervised" if share is not None else "") for name, (rows, share) in bands.items())
    caption = "Conversations by tokens, prompt and answers together; beside the bar: their share of supervised tokens."
    rows = [(name, count(rows), percent(share, 0)) for name, (rows, share) in bands.items()]
    table = Table(("tokens", "conversations", "supervised"), rows, numeric=(1, 2), folded="the numbers")
    return Picture(data_pictures.lengths(bands, f"{caption} {said}"), caption, table)


def _left_out(report: Any) -> list[Block]:
    """Sources, and what was taken out of them, each with its reason."""
    found: list[Block] = []
    sources = _rows(at(report, "sources"))
    keys = ("rows", "rejected", "contaminated", "near_duplicates", "train", "heldout")
    if sources:
        table = [(plain(row.get("name")), *(count(row.get(key)) for key in keys)) for row in sources]
        found.append(Table(("source", *(key.replace("_", " ") for key in keys)), table, numeric=tuple(range(1, 7))))
    lists = (
        ("rows rejected", "rejected", lambda row: (f"{plain(row.get('source'))}:{plain(row.get('line'))}", plain(row.get("reason")))),
        ("contaminated with a suite", "contaminated", lambda row: (plain(row.get("id")), f"{plain(row.get('suite_id'))}: {plain(row.get('ngram'))}")),
        ("near-duplicates taken out", "near_duplicates", lambda row: (plain(row.get("id")), f"{percent(row.get('similarity'), 0)} of {plain(row.get('kept'))}")),
    )
    for title, key, of in lists:
        rows = _rows(at(report, key))
        if rows:
            more = f", the first {SHOWN}" if len(rows) > SHOWN else ""
            shown = [tuple(shortened(cell, 200) for cell in of(row)) for row in rows[:SHOWN]]
            found.append(Table((title, ""), shown, folded=f"{title}: {len(rows)}{more}"))
    return found


def _conversations(run: Found) -> list[Masked]:
    found = []
    for row in _rows(at(run.data, "examples"))[:CONVERSATIONS]:
        what = ", ".join(plain(row[key]) for key in ("domain", "language") if row.get(key))
        stretches = [
            Stretch(shortened(str(part.get("text") or ""), TEXT_SHOWN), part.get("supervised") is True) for part in _rows(row.get("pieces"))
        ]
        note = f"{count(row.get('tokens'))} tokens, {count(row.get('supervised'))} supervised; ended by {plain(row.get('finish_reason'))}"
        note += f"; answers: {plain(row.get('answers'))}"
        title = f"{plain(row.get('prompt_id') or 'conversation')}{' · ' + what if what else ''}"
        found.append(Masked(title, note, str(row.get("language") or ""), stretches))
    return found
