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
from specgraft.targets.static import StaticCache


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

    def first_ids(rows: list[int]) -> list[int]:
        requests = [active[row] for row in rows]
        last, _ = prefill(target, cache, torch.tensor(rows, device=target.device), [request.ids for request in requests])
        return next_ids(target.logits(last), requests)

    while waiting or active:
        free = [row for row in range(batch) if row not in active]
        if waiting and (not active or len(free) >= min(len(waiting), max(1, batch // 8))):
            rows = free[: len(waiting)]
            for row in rows:
                active[row] = waiting.pop()
            for row, token in zip(rows, first_ids(rows), strict=True):
                accept(row, token)
        elif active:
            rows = sorted(active)
            # few rows left: run those alone; a static cache reads any rows without a copy
            some = len(rows) < batch if isinstance(cache, StaticCache) else len(rows) * 2 <= batch
            index = torch.tensor(rows, device=target.device)
            step = target.forward(current[index] if some else current, cache, rows=index if some else None)
            cache.lengths[index] += 1
            last = step.last[:, -1] if some else step.last[index, -1]
            for row, token in zip(rows, next_ids(target.logits(last), [active[row] for row in rows]), strict=True):
                accept(row, token)
        if progress:
            progress(finished, tokens)


def prefill(
    target: Target, cache: SlotCache | StaticCache, rows: torch.Tensor, texts: Sequence[list[int]], taps: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Starts cache rows [b] with these texts: the state of each one's last token [b, D], and the taps of all [b, W, K, D], W the longest;
    behind a text they mean nothing. A static cache takes the texts end to end, so that no padding is computed."""
    lengths = torch.tensor([len(text) for text in texts])
    wide, every = int(lengths.max()), lengths.to(target.device)
    cache.lengths[rows] = 0
    number = torch.arange(len(texts), device=target.device)
    if isinstance(cache, StaticCache):
        ids = torch.tensor([token for text in texts for token in text]).to(target.device)
        step = target.forward_packed(ids, every, cache, taps, rows)
        ends = every.cumsum(0)
        last, kept = step.last[0, ends - 1], step.taps
        if kept is not None:  # as rows; behind a text its last token again
            place = torch.minimum(torch.arange(wide, device=target.device), every[:, None] - 1)
            kept = kept[0][(ends - every)[:, None] + place] if len(texts) > 1 else kept
    else:
        padded = torch.zeros(len(texts), wide, dtype=torch.long)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = torch.tensor(text)
        step = target.forward(padded.to(target.device), cache, taps, rows=rows)
        last, kept = step.last[number, every - 1], step.taps
    cache.lengths[rows] = every
    return last, kept
