"""Numbers as a reader wants them."""

from __future__ import annotations

import json
import re
from typing import Any

from specgraft.report.read import is_number

MISSING = "not measured"

# what HTML, or UTF-8 itself, cannot carry: control characters and lone surrogates
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def printable(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)


def number(value: Any, digits: int = 2, unit: str = "") -> str:
    """`1.5` -> "1.50"; what is no number -> "not measured"."""
    return f"{value:,.{digits}f}{' ' if unit else ''}{unit}" if is_number(value) else MISSING


def count(value: Any) -> str:
    return f"{value:,.0f}" if is_number(value) else MISSING


def percent(share: Any, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %" if is_number(share) else MISSING


def factor(value: Any) -> str:
    """A speedup; three digits near 1, where two would hide which side it is on."""
    if not is_number(value):
        return MISSING
    return f"{value:.{3 if abs(value - 1) < 0.01 else 2}f}×"


def duration(seconds: Any) -> str:
    """`75.2` -> "1 min 15 s"."""
    if not is_number(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plain(value: Any) -> str:
    """Any JSON value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(plain(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    return "none" if value is None else json.dumps(value, default=str)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"
