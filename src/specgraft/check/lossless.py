"""Gate "lossless": greedy text is the same with and without the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgraft.records import GateResult


def lossless(evaluation: Mapping[str, Any]) -> GateResult:
    """Judges the comparison in evaluate.json; differences that were shown to be ties are reported, not counted."""
    found = (evaluation.get("t0") or {}).get("lossless") or {}
    prompts = found.get("prompts", 0)
    if not prompts:
        return GateResult("lossless", False, "not run: no greedy text was compared with plain decoding")
    mismatches, ties = found["mismatches"], found["ties"]
    where = ""
    if mismatches:
        first = next((detail for detail in found.get("details", []) if not detail.get("tie")), None)
        where = f"; first: {first['prompt_id']} at token {first['position']}" if first else ""
    return GateResult(
        "lossless",
        mismatches == 0,
        f"{mismatches} mismatches and {ties} ties on {prompts} prompts, {found.get('tokens', 0)} tokens{where}",
        {"prompts": float(prompts), "mismatches": float(mismatches), "ties": float(ties)},
    )
