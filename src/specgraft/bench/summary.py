"""From timed answers to the numbers of a table. Arithmetic only.

Accept length counts the bonus token. Request mean: over the requests of a suite, then equal weight per suite; pooled: tokens over
verify passes (algorithms.md 6.1). The step-time model is `plan.breakeven`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from specgraft.bench.load import Answered
from specgraft.engines.counters import Counters
from specgraft.plan.breakeven import break_even


def passes(answer: Answered) -> int | None:
    """Verify passes of a request: as the engine says, or from its accepted drafts (the first token comes from prefill, every
    pass commits its accepted drafts and one more). None without a drafter."""
    if answer.steps is not None:
        return answer.steps
    return max(len(answer.ids) - 1 - answer.accepted, 0) if answer.accepted is not None else None


def accept_length(answers: Sequence[Answered]) -> tuple[float | None, float | None, dict[str, float]]:
    """Request mean (equal weight per suite), pooled, and by suite. None without a pass."""
    by_suite: dict[str, list[float]] = {}
    tokens = rounds = 0
    for answer in answers:
        count = passes(answer)
        if count:
            by_suite.setdefault(answer.suite, []).append((len(answer.ids) - 1) / count)
            tokens, rounds = tokens + len(answer.ids) - 1, rounds + count
    if not rounds:
        return None, None, {}
    suites = {name: fmean(values) for name, values in by_suite.items()}
    return fmean(suites.values()), tokens / rounds, suites


def step_seconds(answers: Sequence[Answered]) -> float | None:
    """Seconds of one pass as a request sees them: decode time (behind the first piece) over passes; plain decoding has one per token."""
    seconds = count = 0.0
    for answer in answers:
        steps = passes(answer)
        steps = len(answer.ids) - 1 if steps is None else steps
        if steps > 0:
            seconds, count = seconds + answer.total - answer.first, count + steps
    return seconds / count if count else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of all are not above (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None


def cell_summary(answers: Sequence[Answered], seconds: Sequence[float], counters: Counters | None) -> dict[str, Any]:
    """Numbers of one cell: `seconds` is the wall time of each repeat."""
    repeats = [[answer for answer in answers if answer.repeat == number] for number in range(len(seconds))]
    speeds = [sum(len(a.ids) for a in part) / wall for part, wall in zip(repeats, seconds, strict=True)]
    mean, pooled, suites = accept_length(answers)
    if counters is not None and counters.accept_length is not None:
        pooled = counters.accept_length  # exact: steps cut by a limit count as the engine counted them
    step = step_seconds(answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    per_token = [(a.total - a.first) / (len(a.ids) - 1) for a in answers if len(a.ids) > 1]
    return {
        "requests": len(answers),
        "tokens": sum(len(answer.ids) for answer in answers),
        "tokens_per_second": median(speeds),
        "tokens_per_second_by_repeat": speeds,
        "accept_length": mean,
        "accept_length_pooled": pooled,
        "accept_length_by_suite": suites,
        "survival": counters.survival if counters is not None else [],
        "step_ms": None if step is None else 1000 * step,
        "first_ms": {"median": _ms(percentile([a.first for a in answers], 0.5)), "p95": _ms(percentile([a.first for a in answers], 0.95))},
        "token_ms": {"median": _ms(percentile(per_token, 0.5)), "p95": _ms(percentile(per_token, 0.95))},
        "piece_ms_p95": _ms(percentile(gaps, 0.95)),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def compared(spec: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Speed-up as measured, per repeat (both were alternated), and the break-even accept length of these step times."""
    ratios = [a / b for a, b in zip(spec["tokens_per_second_by_repeat"], plain["tokens_per_second_by_repeat"], strict=False)]
    found: dict[str, Any] = {"speedup": median(ratios), "speedup_by_repeat": ratios}
    if spec["step_ms"] and plain["step_ms"]:
        found["break_even"] = break_even(spec["step_ms"], plain["step_ms"])
    return found


def predicted_speedup(spec: Sequence[Answered], plain: Sequence[Answered]) -> dict[str, float] | None:
    """The step-time model, its times fitted on the first repeat and held against the others.

    A request takes its time to the first piece and (n-1) / tau steps. T_step, T_AR and the times to the first piece are the first repeat's;
    n and tau, the accept length reached, are those of the other repeats, and so is the measured ratio of seconds a token. None with
    one repeat or no pass.
    """
    first, rest = _split(spec)
    plain_first, plain_rest = _split(plain)
    tau, step, single = accept_length(rest)[1], step_seconds(first), step_seconds(plain_first)
    if not (rest and plain_rest and tau and step and single):
        return None

    def modelled(fit: Sequence[Answered], test: Sequence[Answered], per_token: float) -> float:
        prefill = fmean(answer.first for answer in fit)
        tokens = sum(len(answer.ids) for answer in test)
        return sum(prefill + (len(answer.ids) - 1) * per_token for answer in test) / tokens

    def measured(test: Sequence[Answered]) -> float:
        return sum(answer.total for answer in test) / sum(len(answer.ids) for answer in test)

    model = modelled(plain_first, plain_rest, single) / modelled(first, rest, step / tau)
    seen = measured(plain_rest) / measured(rest)
    return {"model": model, "measured": seen, "difference": model / seen - 1}


def _split(answers: Sequence[Answered]) -> tuple[list[Answered], list[Answered]]:
    return [a for a in answers if a.repeat == 0], [a for a in answers if a.repeat > 0]


def same_text(spec: Sequence[Answered], plain: Sequence[Answered]) -> list[dict[str, Any]]:
    """Where greedy answers with and without the drafter part: one row per item that differs, with the first place."""
    base = {(a.suite, a.id): a.ids for a in plain if a.repeat == 0}
    rows = []
    for answer in spec:
        other = base.get((answer.suite, answer.id))
        if answer.repeat == 0 and other is not None and answer.ids != other:
            pairs = enumerate(zip(answer.ids, other, strict=False))
            place = next((at for at, (a, b) in pairs if a != b), min(len(answer.ids), len(other)))
            rows.append({"suite": answer.suite, "id": answer.id, "place": place, "before": other[:place], "plain": other[place:][:1], "drafter": answer.ids[place:][:1]})
    return rows
