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
    """What these rows hold. A conversation can fill several rows; `share` is supervised over all tokens."""
    answers = Counter(row.source_id for row in rows for _ in row.spans)
    reasons = Counter(span.finish_reason for row in rows for span in row.spans)
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(sum(row.loss_mask) for row in rows)
    return {
        "conversations": len(answers),
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
        "conversations": whole["conversations"],
        "rows": whole["rows"],
        "tokens": whole["supervised"],
        "tokens_with_prompts": whole["tokens"],
        "answers": whole["answers"],
        "cut": whole["cut"],
        "end_reasons": whole["end_reasons"],
        "multi_turn": whole["multi_turn"],
        "whose": sorted(by["answers"]),
        "by_language": {name: part["conversations"] for name, part in by["language"].items()},
        "by_domain": {name: part["conversations"] for name, part in by["domain"].items()},
        "splits": {name: part["conversations"] for name, part in by["split"].items()},
        "cells": [{"split": a, "language": b, "domain": c, "conversations": n} for (a, b, c), n in sorted(cells.items())],
        "lengths": {name: {"rows": part["rows"], "share": part["share"]} for name, part in by["length"].items()},
        "examples": [example(tokenizer, row) for row in chosen_examples(rows)] if tokenizer is not None else [],
    }


def chosen_examples(rows: Sequence[Conversation]) -> list[Conversation]:
    """Two rows worth looking at: one with several answers if there is one, and one of another domain; of middling length."""
    fit = [row for row in rows if len(row.input_ids) <= SHOWN_TOKENS] or list(rows[:1])
    by_length = sorted(fit, key=lambda row: (len(row.input_ids), row.prompt_id))
    middle = sorted(by_length, key=lambda row: abs(by_length.index(row) - len(by_length) // 2)) if len(by_length) < 2000 else by_length[len(by_length) // 2 :]
    first = next((row for row in middle if len(row.spans) > 1), middle[0] if middle else None)
    if first is None:
        return []
    other = next((row for row in middle if (row.domain, row.language) != (first.domain, first.language)), None)
    return [first, *([other] if other else [row for row in middle if row is not first][:1])]


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
