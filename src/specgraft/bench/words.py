"""What a benchmark says first, in words: whether speculation pays, why, and which draft length would. Shared by table and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def headline(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and drafter: the range of speed-ups (`low`, `high`) and a sentence (`text`); losses first."""
    said = []
    for model, drafter in dict.fromkeys((row["model"], row["drafter"]) for row in rows if row["drafter"] != "none"):
        mine = [row for row in rows if (row["model"], row["drafter"]) == (model, drafter)]
        worst, best = min(mine, key=lambda row: row["speedup"]), max(mine, key=lambda row: row["speedup"])
        text = _sentence(model, drafter, mine, worst, best)
        said.append({"model": model, "drafter": drafter, "low": worst["speedup"], "high": best["speedup"], "text": text})
    return sorted(said, key=lambda row: row["high"])


def _sentence(model: str, drafter: str, rows: list[dict[str, Any]], worst: dict[str, Any], best: dict[str, Any]) -> str:
    loses = sum(row["speedup"] < 1 for row in rows)
    head = f"{model} with {drafter}: "
    if loses == len(rows):
        head += f"speculation loses everywhere ({worst['speedup']:.2f} to {best['speedup']:.2f} times plain decoding)"
    elif loses:
        head += f"speculation loses in {loses} of {len(rows)} cells ({worst['speedup']:.2f} to {best['speedup']:.2f} times plain decoding)"
    else:
        head += f"{worst['speedup']:.2f} to {best['speedup']:.2f} times plain decoding"
    single = next((row for row in rows if row.get("best")), None)
    if single is None:
        return head + "."
    length, needed = single["accept_length_pooled"], single.get("break_even")
    reason = (
        f"; one at a time a step takes as long as {needed:.2f} plain ones and commits {length:.2f} tokens"
        + (f" (the target's pass over them {single['verify_ms']:.1f} of {single['step_ms']:.1f} ms)" if single["verify_ms"] < single["step_ms"] else "")
    )
    advice = single["best"]
    more = (
        f". Best draft length here: {advice['at']}, {advice['speedup']:.2f} times plain, prefill left out"
        if advice["draft_tokens"]
        else f". No draft length pays; the least bad is {advice['at']}, {advice['speedup']:.2f} times plain, prefill left out"
    )
    return head + reason + more + "."
