"""Plain batched decoding with the target: every row has its own length, a finished row goes to the next prompt at once.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specgraft.ops.sampling import distribution, draw
from specgraft.targets.model import Target
from specgraft.targets.slots import SlotCache


@dataclass
class Request:
    """One prompt to be continued. `generate` fills `output` and `finish_reason`."""

    ids: list[int]  # rendered prompt
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    uniform: torch.Tensor | None = None  # [max_new_tokens] in [0,1), one per token; needed when temperature > 0
    output: list[int] = field(default_factory=list)
    finish_reason: str = ""


def next_ids(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each row: logits [R,V] and as many requests."""
    chosen = logits.argmax(-1)
    by_law: dict[tuple[float, float, int], list[int]] = {}
    for row, request in enumerate(requests):
        if request.temperature > 0:
            by_law.setdefault((request.temperature, request.top_p, request.top_k), []).append(row)
    for (temperature, top_p, top_k), rows in by_law.items():
        index = torch.tensor(rows, device=logits.device)
        level = torch.stack([_level(requests[row]) for row in rows]).to(logits.device)
        chosen[index] = draw(distribution(logits[index], temperature, top_p, top_k), level)
    return chosen.tolist()


def _level(request: Request) -> torch.Tensor:
    assert request.uniform is not None, "a sampled request needs its uniforms"
    return request.uniform[len(request.output)]


@torch.inference_mode()
def generate(
    target: Target, requests: Sequence[Request], batch: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Continues every request until an end token (kept in the output) or its limit, `batch` rows at a time.

    Which rows share a pass depends on the requests alone, so the same list gives the same ids again.
    `progress(finished, tokens)` is called after every pass.
    """
    # prompts of like length are prefilled together: little padding, and the longest start first
    waiting = sorted(requests, key=lambda request: len(request.ids))
    if not waiting:
        return
    batch = min(batch, len(waiting))
    slots = max(len(request.ids) + request.max_new_tokens for request in waiting) + 1
    slots = max(slots, max(len(request.ids) for request in waiting) * 2)  # room for right padding behind a prompt
    cache = target.cache(batch, slots)
    active: dict[int, Request] = {}
    current = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
    finished = tokens = 0

    def accept(row: int, token: int) -> None:
        nonlocal finished, tokens
        request = active[row]
        request.output.append(token)
        tokens += 1
        current[row, 0] = token
        if token in target.end_ids or len(request.output) == request.max_new_tokens:
            request.finish_reason = "stop" if token in target.end_ids else "length"
            finished += 1
            del active[row]

    while waiting or active:
        free = [row for row in range(batch) if row not in active]
        if waiting and (not active or len(free) >= min(len(waiting), max(1, batch // 8))):
            rows = free[: len(waiting)]
            for row in rows:
                active[row] = waiting.pop()
            for row, token in zip(rows, _prefill(target, cache, rows, [active[row] for row in rows]), strict=True):
                accept(row, token)
        elif active:
            rows = sorted(active)
            some = len(rows) * 2 <= batch  # few rows left: run those alone
            index = torch.tensor(rows, device=target.device)
            step = target.forward(current[index] if some else current, cache, rows=index if some else None)
            cache.lengths[index] += 1
            last = step.last[:, -1] if some else step.last[index, -1]
            for row, token in zip(rows, next_ids(target.logits(last), [active[row] for row in rows]), strict=True):
                accept(row, token)
        if progress:
            progress(finished, tokens)


def _prefill(target: Target, cache: SlotCache, rows: list[int], requests: list[Request]) -> list[int]:
    lengths = torch.tensor([len(request.ids) for request in requests], device=target.device)
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, request in enumerate(requests):
        ids[row, : len(request.ids)] = torch.tensor(request.ids)
    index = torch.tensor(rows, device=target.device)
    cache.lengths[index] = 0
    step = target.forward(ids.to(target.device), cache, rows=index)
    cache.lengths[index] = lengths
    last = step.last[torch.arange(len(rows), device=target.device), lengths - 1]
    return next_ids(target.logits(last), requests)
