"""Is greedy text the same with and without the drafter? Token by token, against plain decoding of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specgraft.targets.model import Target

TIE = 1e-3  # two logits closer than this, relative to their size, may swap when the shape of a pass changes


def compare(
    target: Target,
    prompts: Sequence[list[int]],
    plain: Sequence[list[int]],
    drafted: Sequence[list[int]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Counts prompts whose texts differ, split in ties and mismatches, with details of each; `tokens` were compared."""
    tokens, details = 0, []
    for name, prompt, left, right in zip(names, prompts, plain, drafted, strict=True):
        place = first_difference(left, right)
        tokens += len(left) if place is None else place + 1
        if place is not None:
            details.append({"prompt_id": name, "position": place, **judge(target, prompt, left, right, place)})
    ties = sum(detail["tie"] for detail in details)
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "mismatches": len(details) - ties,
        "ties": ties,
        "details": details,
    }


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, the end of the shorter one included; None when equal."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def judge(target: Target, prompt: list[int], left: Sequence[int], right: Sequence[int], place: int) -> dict[str, Any]:
    """The two tokens, their logits in a plain pass of one row, and whether these are a tie.

    A text that merely ends early, or a token that plain decoding itself would not have chosen, is never a tie.
    """
    if place >= min(len(left), len(right)):
        return {"plain": None, "drafted": None, "gap": None, "tie": False}
    a, b = left[place], right[place]
    ids = torch.tensor([prompt + list(left[:place])], device=target.device)
    step = target.forward(ids, target.cache(1, ids.shape[1]))
    logits = target.logits(step.last[0, -1])
    gap = abs(float(logits[a] - logits[b]))
    top = float(logits.max() - torch.minimum(logits[a], logits[b]))
    scale = max(1.0, abs(float(logits[a])), abs(float(logits[b])))
    return {"plain": a, "drafted": b, "gap": gap, "tie": max(gap, top) < TIE * scale}
