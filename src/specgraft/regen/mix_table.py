"""The report of a mix as lines for a terminal. Plain text: columns line up, nothing is shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHOWN = 12  # rows of a list that `data plan` prints; mix.json has all


def plan_lines(report: dict[str, Any]) -> list[str]:
    """What a mix holds: quotas, sources, and all that was taken out, each with its reason."""
    lines: list[str] = []
    for split, held in report["splits"].items():
        lines += [f"{split}: {held['got']} of {held['wanted']} prompts, {held['families']} families", *_cells(held["cells"]), *_shares(held), ""]
    if sources := report.get("sources"):
        keys = ["name", "rows", "rejected", "not_asked", "contaminated", "near_duplicates", "available", "train", "heldout"]
        lines += ["sources", *_table([[key.replace("_", " ") for key in keys], *([str(row[key]) for key in keys] for row in sources)]), ""]
    for suite in report.get("suites", []):
        lines.append(f"suite {suite['path']}: {suite['items']} items, {suite['runs']} runs of words, {suite['wording']} left out as the suite's own wording")
    what = {"remove": "removed", "report": "kept, only reported"}.get(report.get("contamination", ""), "")
    lines += _list(
        f"contaminated, {what}", [f"{row['id']}: {row['suite']} {row['suite_id']}: {row['ngram']}" for row in report.get("contaminated", [])]
    )
    lines += _list(
        "near-duplicates removed", [f"{row['id']}: {row['similarity']:.2f} of {row['kept']}" for row in report.get("near_duplicates", [])]
    )
    joined = report.get("joined", [])
    if joined:
        lines.append(f"families joined by near-duplicates: {sum(len(row['of']) for row in joined)} names are {len(joined)} families")
    lines += _list(
        "not asked for",
        [f"{row['language']}-{row['domain']} {row['length']}: {row['prompts']} prompts" for row in report.get("not_asked", [])],
    )
    lines += _list("rows rejected", [f"{row['source']}:{row['line']}: {row['reason']}" for row in report.get("rejected", [])])
    return lines[:-1] if lines and not lines[-1] else lines


def shortfalls(report: dict[str, Any]) -> list[str]:
    """A line for each cell that got less than its quota."""
    return [
        f"{split} {cell['language']}-{cell['domain']} {cell['length']}: {cell['got']} of {cell['wanted']}"
        for split, held in report["splits"].items()
        for cell in held["cells"]
        if cell["got"] < cell["wanted"]
    ]


def _cells(cells: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["language", "domain", "length", "wanted", "got", "available", ""]]
    for cell in cells:
        missing = cell["wanted"] - cell["got"]
        rows.append(
            [
                *(str(cell[key]) for key in ("language", "domain", "length", "wanted", "got")),
                str(cell.get("available", "")),
                f"{missing} missing" if missing else "",
            ]
        )
    return _table(rows)


def _shares(held: dict[str, Any]) -> list[str]:
    """Wanted against got, by language, by domain, by length."""
    lines = []
    for axis in ("language", "domain", "length"):
        names = list(dict.fromkeys(cell[axis] for cell in held["cells"]))
        if len(names) < 2:
            continue
        sums = {name: [sum(c[key] for c in held["cells"] if c[axis] == name) for key in ("wanted", "got")] for name in names}
        lines.append(f"  by {axis}: " + ", ".join(f"{name} {got} of {wanted}" for name, (wanted, got) in sums.items()))
    return lines


def _list(title: str, rows: Sequence[str]) -> list[str]:
    if not rows:
        return []
    more = [f"  ... and {len(rows) - SHOWN} more: `data plan --json PATH` has all"] if len(rows) > SHOWN else []
    return [f"{title}: {len(rows)}", *(f"  {row}" for row in rows[:SHOWN]), *more]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Text columns to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    numeric = [all(row[place].isdigit() or not row[place] for row in rows[1:]) for place in range(len(widths))]
    return [
        ("  " + "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True))).rstrip()
        for row in rows
    ]
