"""What a step says of itself: the parts of micro-batches and ranks added up once, and a row of them for the metrics file.

Legend: G draft tokens.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specgraft.distill.objective import Outcome
from specgraft.distill.parts import SUMS
from specgraft.distill.ranks import total, world

BY_SLOT = ("alpha", "hit", "recall", "mass", "oracle", "path")  # one plus the sum of `oracle` or `path` is an accept length
# of the machine, not of the training
MEASURED = (
    "seconds", "stall_seconds", "stall_share", "tokens_per_second", "rss_mb", "device_mb", "wait_seconds", "producer_share", "queue_bytes",
    "queue_rows", "device_activity",
)  # fmt: skip


def added(outcomes: Sequence[Outcome], size: int) -> Outcome:
    """A step from its micro-batches, and from those of all ranks; without graph. Its loss is that of the whole step."""
    if len(outcomes) == 1 and world() == 1:
        return outcomes[0]
    first = outcomes[0]
    loss = torch.stack([outcome.loss.detach() / world() for outcome in outcomes]).sum()
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        for name, part in outcome.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + part
    table = torch.zeros(len(SUMS) + 1, size + 1, dtype=torch.float64, device=loss.device)  # sums and whether they were told
    table[-1, 0] = loss
    for outcome in outcomes:
        assert set(outcome.sums) <= set(SUMS), set(outcome.sums) - set(SUMS)
        for name, values in outcome.sums.items():
            table[SUMS.index(name), :-1] += values
            table[SUMS.index(name), -1] = 1
    table = total(table)
    sums = {name: table[row, :-1].float() for row, name in enumerate(SUMS) if table[row, -1]}
    return replace(first, loss=table[-1, 0].float(), numerators={}, sums=sums, seconds=seconds)


def summary(outcome: Outcome, seconds: float = 0.0) -> dict[str, Any]:
    """Means of a step for the metrics file: the loss, every loss that was computed; per slot what acceptance is made of.

    `seconds` of the step: what its parts do not account for is backward and update, and goes to `learn`.
    """
    row: dict[str, Any] = {"loss": float(outcome.loss.detach())}
    for name, part in outcome.seconds.items():
        row[f"{name}_seconds"] = part + (seconds - sum(outcome.seconds.values()) if name == "learn" else 0.0)
    sums = outcome.sums
    total_count = float(sums["count"].sum())
    if not total_count:  # no mean of nothing
        return row | {"slots": 0}
    count = sums["count"].clamp(min=1)
    for name, values in sums.items():
        if name in BY_SLOT:
            row[name] = (values / count).tolist()
        elif name == "accepted":  # branches accepted up to each slot: every one has a first slot
            row[name] = (values / count[0]).tolist()
            row["branch_accept_length"] = 1 + sum(row[name])
        elif name == "selector":  # slots whose label is no candidate are no part of this mean
            row[name] = float(values.sum()) / max(1.0, float(sums["taught"].sum()))
        elif name not in ("count", "taught"):
            row["confidence" if name == "bce" else name] = float(values.sum()) / total_count
    row["slots"] = int(total_count)
    return row


def pace(tokens: int, seconds: float, stall: float, device: torch.device, staleness: int = 0) -> dict[str, Any]:
    """Speed of a step over `tokens` of its conversations, the part of its time in which the trainer waited for them, and memory.

    `staleness`: steps by which the weights that drew what is learnt from lag behind.
    """
    whole = max(seconds + stall, 1e-9)
    row: dict[str, Any] = {
        "tokens": tokens, "tokens_per_second": tokens / whole, "stall_seconds": stall, "stall_share": stall / whole, "staleness": staleness,
        "rss_mb": resident_mb(),
    }  # fmt: skip
    if device.type == "cuda":
        row["device_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return row


def resident_mb() -> float:
    """Memory of this process in MB (2**20)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, ValueError, IndexError):  # not Linux: the most it ever was; macOS counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
