"""Counts of a run's text: for `specgraft data stats`, and for the report (data.json)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgraft.records import Conversation
from specgraft.regen.show import Piece, pieces

BANDS = (128, 256, 512, 1024, 2048, 4096, 8192)  # upper ends, tokens of a row
AXES: dict[str, Callable[[Conversation], str]] = {
    "split": lambda row: row.split,
    "language": lambda row: row.language,
    "domain": lambda row: row.domain,
    "length": lambda row: band(len(row.input_ids)),
    "answers": lambda row: row.answers,
}
COLUMNS = ("prompts", "rows", "answers", "tokens", "supervised", "share", "cut", "multi_turn")
SHOWN_TOKENS = 4096  # of an example in the report, at most; a page must stay a page


def band(tokens: int) -> str:
    """`300` -> "256-511"."""
    low = 0
    for high in BANDS:
        if tokens < high:
            return f"{low}-{high - 1}"
        low = high
    return f"{low}-"


def counts(rows: Sequence[Conversation]) -> dict[str, Any]:
    """What these rows hold. A prompt can fill several rows; `share` is supervised over all tokens."""
    answers = Counter(row.source_id for row in rows for _ in row.spans)
    reasons = Counter(span.finish_reason for row in rows for span in row.spans)
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(sum(row.loss_mask) for row in rows)
    return {
        "prompts": len(answers),
        "rows": len(rows),
        "answers": answers.total(),
        "tokens": tokens,
        "supervised": supervised,
        "share": supervised / tokens if tokens else 0.0,
        "cut": reasons["length"],
        "end_reasons": dict(sorted(reasons.items())),
        "multi_turn": sum(number > 1 for number in answers.values()),
        "greedy": sum(row.temperature == 0 for row in rows),
        "families": len({row.family for row in rows}),
    }


def stats(rows: Sequence[Conversation], refused: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`counts` of all rows and by split, language, domain, length and whose answers; and why prompts were refused."""
    by: dict[str, dict[str, Any]] = {}
    for axis, of in AXES.items():
        names = sorted({of(row) for row in rows}, key=lambda name: (int(name.split("-")[0]) if axis == "length" else 0, name))
        by[axis] = {name: counts([row for row in rows if of(row) == name]) for name in names}
    reasons = Counter(str(row.get("reason")) for row in refused)
    return {"all": counts(rows), "by": by, "refused": {"prompts": len(refused), "reasons": dict(reasons.most_common())}}


def stats_lines(found: dict[str, Any]) -> list[str]:
    """The table of `specgraft data stats`."""
    table = [["", "", *(column.replace("_", " ") for column in COLUMNS)], _line("all", "", found["all"])]
    for axis, parts in found["by"].items():
        if axis != "answers" or len(parts) > 1:
            table += [_line(axis if number == 0 else "", name, part) for number, (name, part) in enumerate(parts.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    whole, refused = found["all"], found["refused"]
    ends = ", ".join(f"{reason} {count:,}" for reason, count in whole["end_reasons"].items())
    lines += [
        "",
        f"ends: {ends}; {whole['cut']} of {whole['answers']} cut ({whole['cut'] / max(whole['answers'], 1):.0%})",
        f"{whole['families']:,} families; {whole['greedy']:,} of {whole['rows']:,} rows answered greedily; "
        f"answers: {', '.join(found['by']['answers'])}",
    ]
    if refused["prompts"]:
        lines.append(f"refused: {refused['prompts']} prompts")
        lines += [f"  {count} x {reason}" for reason, count in list(refused["reasons"].items())[:10]]
    return lines


def _line(axis: str, name: str, part: dict[str, Any]) -> list[str]:
    return [axis, name, *(f"{part[key]:.0%}" if key == "share" else f"{part[key]:,}" for key in COLUMNS)]


def read_refused(folder: Path) -> list[dict[str, Any]]:
    """Prompts that regen left out, each with its reason. Raises ValueError naming a damaged file."""
    path = folder / "refused.jsonl"
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: damaged; delete it and run regen again") from None


def data_summary(rows: Sequence[Conversation], tokenizer: Any = None) -> dict[str, Any]:
    """What the report shows of a run's text; with a tokenizer, two conversations with their masks."""
    found = stats(rows)
    whole, by = found["all"], found["by"]
    cells = Counter((row.split, row.language, row.domain) for row in rows if row.row == 1)
    return {
        "conversations": whole["rows"],
        "prompts": whole["prompts"],
        "turns": whole["answers"],
        "answers": ", ".join(sorted(by["answers"], reverse=True)),
        "tokens": whole["supervised"],
        "tokens_with_prompts": whole["tokens"],
        "cut": whole["cut"],
        "end_reasons": whole["end_reasons"],
        "multi_turn": whole["multi_turn"],
        **{f"by_{axis}": {name: part["rows"] for name, part in by[axis].items()} for axis in ("language", "domain")},
        "splits": {name: part["rows"] for name, part in by["split"].items()},
        "cells": [{"split": a, "language": b, "domain": c, "prompts": n} for (a, b, c), n in sorted(cells.items())],
        "lengths": {name: {"rows": part["rows"], "share": part["share"]} for name, part in by["length"].items()},
        "examples": [example(tokenizer, row) for row in chosen_examples(rows)] if tokenizer is not None else [],
    }


def chosen_examples(rows: Sequence[Conversation]) -> list[Conversation]:
    """Two rows worth looking at, of middling length: one with several answers if there is one, and one of another kind."""
    ranked = sorted((row for row in rows if row.split == "train"), key=lambda row: (len(row.input_ids), row.prompt_id)) or list(rows)
    middle = ranked[len(ranked) // 2 :] + ranked[: len(ranked) // 2][::-1]
    if not middle:
        return []
    first = next((row for row in middle if len(row.spans) > 1), middle[0])
    others = [row for row in middle if row is not first]
    other = next((row for row in others if (row.domain, row.language) != (first.domain, first.language)), others[0] if others else None)
    return [first, other] if other else [first]


def example(tokenizer: Any, row: Conversation) -> dict[str, Any]:
    parts: list[Piece] = pieces(tokenizer, row.input_ids[:SHOWN_TOKENS], row.loss_mask[:SHOWN_TOKENS])
    return {
        "prompt_id": row.prompt_id,
        "split": row.split,
        "language": row.language,
        "domain": row.domain,
        "tokens": len(row.input_ids),
        "supervised": sum(row.loss_mask),
        "answers": row.answers,
        "finish_reason": row.finish_reason,
        "pieces": [{"text": part.text, "supervised": part.supervised} for part in parts],
    }
