"""The section about a real engine: whether speculation pays there, and every measured cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specgraft.report.blocks import Block, Picture, Section, Table
from specgraft.report.read import Found, at, is_number
from specgraft.report.svg import MUTED, SERIES, drawn
from specgraft.report.text import number, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "In the engine"


def bench(run: Found) -> Section | None:
    """None where no engine was measured."""
    if not run.bench:
        return None
    rows = [row for row in run.bench.get("rows", []) if isinstance(row, dict)]
    blocks: list[Block] = []  # the sentences stand at the top of the page
    single = [row for row in rows if row.get("concurrency") == 1 and is_number(row.get("break_even")) and is_number(row.get("accept_length_pooled"))]
    if single:
        caption = (
            "One request at a time: where the accept length (dot) is right of the break-even (bar's end), speculation pays. "
            "Break-even is the time of a step over that of a plain one."
        )
        blocks.append(Picture(_bars(single, caption), caption))
    blocks.append(_cells(rows))
    if checks := _model(rows):
        blocks.append(checks)
    blocks.append(_conditions(run.bench))
    return Section("bench", TITLE, blocks)


def _bars(rows: list[dict[str, Any]], alt: str) -> str:
    labels = [f"{row['model']}, {row['drafter']}, T={plain(row['temperature'])}" for row in rows]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = list(range(len(rows)))[::-1]
        axes.barh(places, [row["break_even"] for row in rows], color=MUTED, alpha=0.35, height=0.55, label="break-even")
        axes.plot([row["accept_length_pooled"] for row in rows], places, "o", color=SERIES[0], label="accept length")
        axes.set_yticks(places, labels)
        axes.set_xlabel("tokens per round")
        axes.set_xlim(0, 1.12 * max(max(row["break_even"], row["accept_length_pooled"]) for row in rows))
        axes.legend(loc="lower right", frameon=False)

    return drawn("break-even", alt, (6.4, 1.2 + 0.36 * len(rows)), draw)


def _cells(rows: list[dict[str, Any]]) -> Table:
    columns = ("model", "drafter", "T", "at a time", "tokens/s", "times plain", "accept length", "pooled", "break-even", "step ms", "first ms", "token ms", "same text")
    table = [
        (
            plain(row["model"]), plain(row["drafter"]), plain(row["temperature"]), plain(row["concurrency"]),
            number(row.get("tokens_per_second"), 1), _or_nothing(row.get("speedup")), _or_nothing(row.get("accept_length")),
            _or_nothing(row.get("accept_length_pooled")), _or_nothing(row.get("break_even")), number(row.get("step_ms"), 1),
            _pair(row.get("first_ms"), 0), _pair(row.get("token_ms"), 1), _same(row.get("lossless")),
        )
        for row in rows
    ]  # fmt: skip
    caption = (
        "Medians over repeats, contenders taking turns. Accept length counts the bonus token: request mean with equal weight per suite, and pooled. "
        "First and token times: median / 95th percentile over requests."
    )
    return Table(columns, table, numeric=tuple(range(2, 12)), caption=caption)


def _or_nothing(value: Any) -> str:
    """Empty where there is nothing to measure: a row without a drafter."""
    return number(value, 2) if is_number(value) else ""


def _pair(value: Any, digits: int) -> str:
    return f"{number(at(value, 'median'), digits)} / {number(at(value, 'p95'), digits)}" if isinstance(value, dict) else ""


def _same(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    ties = f", {value['ties']} of them ties" if value["differ"] else ""
    alone = f"; plain decoding with itself {value['prompts'] - value['plain_differ']}" if value.get("plain_differ") else ""
    return f"{value['prompts'] - value['differ']} of {value['prompts']} the same{ties}{alone}"


def _model(rows: list[dict[str, Any]]) -> Table | None:
    """The step-time model against what was measured."""
    table = [
        (
            plain(row["model"]), plain(row["drafter"]), plain(row["temperature"]), plain(row["concurrency"]),
            number(row["model_check"]["model"], 3), number(row["model_check"]["measured"], 3), f"{100 * row['model_check']['difference']:+.1f} %",
        )
        for row in rows
        if isinstance(row.get("model_check"), dict)
    ]  # fmt: skip
    if not table:
        return None
    columns = ("model", "drafter", "T", "at a time", "times plain, model", "measured", "difference")
    caption = "The times of the step-time model (step, plain step, time to the first piece) are the first repeat's; with the accept length that the other repeats reached it is held against their speed."
    return Table(columns, table, numeric=(2, 3, 4, 5, 6), caption=caption, folded="the step-time model against the measurement")


def _conditions(found: dict[str, Any]) -> Table:
    settings = found.get("settings", {})
    part = settings.get("bench", {})
    suites = ", ".join(f"{name}: {count}" for name, count in found.get("suites", {}).items())
    rows = [
        ("engine", plain(part.get("engine"))),
        ("prompts", suites),
        ("new tokens, at most", plain(part.get("max_new_tokens"))),
        ("repeats", plain(part.get("repeats"))),
        ("drafts a round", plain(part.get("draft_tokens") or "all that the drafter was made for")),
        ("machine", plain(settings.get("machine"))),
    ]
    return Table(("how", ""), [row for row in rows if row[1]], folded="how it was measured")
