"""The benchmark as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specgraft.bench.words import headline

COLUMNS = ("model", "drafter", "T", "at a time", "tokens/s", "times plain", "accept length", "pooled", "break-even", "step ms", "first ms", "token ms", "same text")


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the sentences, losses first, and every cell, to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width
        console = Console(highlight=False, width=180)
    for said in headline(rows):
        console.print(said["text"], markup=False)
    table = Table(*COLUMNS, title="accept length counts the bonus token: request mean with equal weight per suite, and pooled")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row as text, in the order of COLUMNS."""
    low, high = min(row["tokens_per_second_by_repeat"]), max(row["tokens_per_second_by_repeat"])
    return (
        row["model"],
        row["drafter"],
        f"{row['temperature']:g}",
        str(row["concurrency"]),
        f"{row['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
        _number(row.get("speedup")),
        _number(row["accept_length"]),
        _number(row["accept_length_pooled"]),
        _number(row.get("break_even")),
        _number(row["step_ms"], 1),
        f"{_number(row['first_ms']['median'], 0)} / {_number(row['first_ms']['p95'], 0)}",
        f"{_number(row['token_ms']['median'], 1)} / {_number(row['token_ms']['p95'], 1)}",
        _same(row.get("lossless")),
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _same(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    same = found["prompts"] - found["differ"]
    ties = f", {found['ties']} ties" if found["differ"] else ""
    alone = f"; plain with itself {found['prompts'] - found['plain_differ']}" if found.get("plain_differ") else ""
    return f"{same} of {found['prompts']}{ties}{alone}"
