"""The tables that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

out = Console(soft_wrap=False)


def gate_table(rows: Sequence[dict[str, Any]]) -> None:
    """Rows of gates.json: gates with what they measured."""
    table = Table(title="gates")
    table.add_column("gate")
    table.add_column("result")
    table.add_column("measured", overflow="fold")
    for row in rows:
        verdict = "[green]passed[/]" if row["passed"] else "[red]FAILED[/]" + (" (allowed)" if row.get("allowed") else "")
        table.add_row(row["name"], verdict, escape(row["detail"]))
    out.print(table)


def summary_table(summary: dict[str, Any], evaluation: dict[str, Any]) -> None:
    """Accept length, speed and exactness of a run; every accept length counts the bonus token."""
    settings = evaluation["settings"]
    table = Table(title=f"accept length, G = {settings['draft_tokens']}, bonus token included")
    for name in ("", "T = 0", "T = 1"):
        table.add_column(name, justify="left" if not name else "right")
    zero, one = evaluation["t0"], evaluation.get("t1", {})
    for label, key in (("request mean", "accept_length"), ("pooled", "accept_length_pooled"), ("predicted", "predicted_accept_length")):
        table.add_row(label, number(zero.get(key)), number(one.get(key)))
    table.add_row("prompts", str(zero["requests"]), str(one.get("requests", "-")))
    speed = evaluation.get("speed", {})
    for label, key in (("tokens/s, plain", "plain_tokens_per_second"), ("tokens/s, drafter", "tokens_per_second"), ("speedup", "speedup")):
        table.add_row(label, *(number(speed.get(at, {}).get(key)) for at in ("t0", "t1")))
    exact = zero["lossless"]
    table.add_row("differs from plain decoding", f"{exact['mismatches']} of {exact['prompts']} ({exact['ties']} ties)", "-")
    out.print(table)
    out.print(f"minutes: {summary['minutes']:.1f}   evaluated in {settings['dtype']}, speed in {speed.get('dtype', '-')}")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
