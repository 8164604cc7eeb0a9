"""Tokens per second with and without the drafter: one prompt at a time, alternating, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specgraft.decode.loop import Request, Timing, decode, uniform_count
from specgraft.decode.pair import Pair
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate
from specgraft.targets.sampling import Law, uniforms


def measure(
    pair: Pair,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Times every prompt after one warm-up of both ways. Rates are tokens over seconds, prefill included; steps are not.

    Step times are per pass in milliseconds, means over all passes; `step` is called after every prompt.
    """
    plain_once(pair, prompts[0], min(8, max_new_tokens), temperature, seed)
    drafted_once(pair, prompts[0], min(8, max_new_tokens), temperature, seed)
    runs, plain_steps, plain_passes, total = [], 0.0, 0, Timing()
    for number, prompt in enumerate(prompts):
        plain_seconds, plain_tokens, prefill = plain_once(pair, prompt, max_new_tokens, temperature, seed + number)
        seconds, request, timing = drafted_once(pair, prompt, max_new_tokens, temperature, seed + number)
        plain_steps += plain_seconds - prefill
        plain_passes += plain_tokens - 1
        for name in ("prefill", "draft", "verify", "rest", "rounds"):
            setattr(total, name, getattr(total, name) + getattr(timing, name))
        runs.append(
            {
                "plain_seconds": plain_seconds,
                "plain_tokens": plain_tokens,
                "seconds": seconds,
                "tokens": len(request.output),
                "rounds": len(request.rounds),
            }
        )
        step()
    return summary(runs, plain_steps, plain_passes, total)


def summary(runs: list[dict[str, Any]], plain_steps: float, plain_passes: int, total: Timing) -> dict[str, Any]:
    """The `speed` table of one temperature from its timed runs."""
    plain_rate = sum(run["plain_tokens"] for run in runs) / sum(run["plain_seconds"] for run in runs)
    rate = sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)
    ratios = sorted((run["tokens"] / run["seconds"]) / (run["plain_tokens"] / run["plain_seconds"]) for run in runs)
    step_seconds = sum(run["seconds"] for run in runs) - total.prefill
    per_round = 1000 / max(1, total.rounds)
    return {
        "plain_tokens_per_second": plain_rate,
        "tokens_per_second": rate,
        "speedup": rate / plain_rate,
        "speedup_median": ratios[len(ratios) // 2],
        "plain_step_ms": 1000 * plain_steps / max(1, plain_passes),
        "step_ms": step_seconds * per_round,
        "draft_ms": total.draft * per_round,
        "verify_ms": total.verify * per_round,
        "rest_ms": (step_seconds - total.draft - total.verify) * per_round,
        "runs": runs,
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def plain_once(
    pair: Pair, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
) -> tuple[float, int, float]:
    """Seconds, tokens, and seconds of prefill of one prompt without the drafter."""
    uniform = uniforms(seed, "speed-plain", max_new_tokens) if temperature > 0 else None
    request = PlainRequest(prompt, max_new_tokens, temperature, uniform=uniform)
    marks: list[float] = []

    def mark(finished: int, tokens: int) -> None:
        if not marks:
            marks.append(now(pair.target.device))

    began = now(pair.target.device)
    generate(pair.target, [request], 1, mark)
    return now(pair.target.device) - began, len(request.output), marks[0] - began


def drafted_once(
    pair: Pair, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
) -> tuple[float, Request, Timing]:
    """Seconds, the finished request, and where the time went, with the drafter."""
    count = uniform_count(max_new_tokens, pair.drafter.config.draft_tokens)
    uniform = uniforms(seed, "speed", count) if temperature > 0 else None
    request, timing = Request(prompt, max_new_tokens, Law(temperature), uniform), Timing()
    began = now(pair.target.device)
    decode(pair, [request], 1, timing=timing)
    return now(pair.target.device) - began, request, timing
