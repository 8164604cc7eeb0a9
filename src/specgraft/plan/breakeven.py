"""When does speculative decoding pay? Arithmetic only (algorithms 6.2), for one sequence at a fixed batch and context.

Times are milliseconds, accept length is tokens committed per verify round, bonus token included, so it lies in
[1, G+1] for G draft tokens. Every function raises ValueError, in one line, for a number that cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MS = 1000.0  # milliseconds of a second


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a number above 0 (given: {value:g})")
    return float(value)


def check_draft_tokens(draft_tokens: int) -> int:
    """G. Raises ValueError below 1."""
    if draft_tokens < 1:
        raise ValueError(f"draft tokens must be at least 1 (given: {draft_tokens})")
    return int(draft_tokens)


def check_accept_length(accept_length: float, draft_tokens: int | None = None) -> float:
    """Raises ValueError outside [1, G+1]; without G only the lower end is known."""
    if draft_tokens is None:
        if not math.isfinite(accept_length) or accept_length < 1:
            raise ValueError(f"accept length counts the bonus token, so it is at least 1 (given: {accept_length:g})")
        return float(accept_length)
    top = check_draft_tokens(draft_tokens) + 1
    if not 1 <= accept_length <= top:
        raise ValueError(
            f"accept length at {draft_tokens} draft tokens lies in [1, {top}], bonus included "
            f"(given: {accept_length:g})"
        )
    return float(accept_length)


def check_survival(survival: Sequence[float]) -> list[float]:
    """`s_j`, the share of rounds that accept at least j drafts. Raises ValueError when it rises or leaves [0, 1]."""
    if not survival:
        raise ValueError("survival needs one number per draft token (none given)")
    for slot, value in enumerate(survival, start=1):
        if not 0 <= value <= 1:
            raise ValueError(f"survival of slot {slot} must lie in [0, 1] (given: {value:g})")
        if slot > 1 and value > survival[slot - 2]:
            raise ValueError(
                f"survival must not rise, but slot {slot} has {value:g} after {survival[slot - 2]:g}: "
                "give the share of rounds that accept at least j drafts, not conditional rates"
            )
    return [float(value) for value in survival]


def plain_step_ms(tokens_per_second: float) -> float:
    """T_AR: one step of decoding without a drafter."""
    return MS / _positive("plain tokens per second", tokens_per_second)


def step_ms(fixed_ms: float, draft_ms: float, verify_ms: float) -> float:
    """T_step = T_fixed + T_draft(G) + T_verify(G+1), of one round."""
    for name, value in (("fixed ms", fixed_ms), ("draft ms", draft_ms)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} must not be negative (given: {value:g})")
    return fixed_ms + draft_ms + _positive("verify ms", verify_ms)


def tokens_per_second(accept_length: float, step_ms: float, draft_tokens: int | None = None) -> float:
    """tau / T_step."""
    return MS * check_accept_length(accept_length, draft_tokens) / _positive("step ms", step_ms)


def speedup(accept_length: float, step_ms: float, plain_ms: float, draft_tokens: int | None = None) -> float:
    """tau * T_AR / T_step; below 1 the drafter makes decoding slower."""
    tau = check_accept_length(accept_length, draft_tokens)
    return tau * _positive("plain ms", plain_ms) / _positive("step ms", step_ms)


def break_even(step_ms: float, plain_ms: float) -> float:
    """tau* = T_step / T_AR: the accept length at which speculation neither wins nor loses."""
    return _positive("step ms", step_ms) / _positive("plain ms", plain_ms)


def largest_step_ms(accept_length: float, plain_ms: float, draft_tokens: int | None = None) -> float:
    """tau * T_AR: a longer step than this loses at that accept length."""
    return check_accept_length(accept_length, draft_tokens) * _positive("plain ms", plain_ms)


def implied_step_ms(accept_length: float, tokens_per_second: float, draft_tokens: int | None = None) -> float:
    """The step that a measured speed and accept length imply; compare it with a measured step."""
    tau = check_accept_length(accept_length, draft_tokens)
    return MS * tau / _positive("tokens per second", tokens_per_second)


def accept_length_of_survival(survival: Sequence[float]) -> float:
    """tau = 1 + sum of s_j, where every round proposes all G drafts."""
    return 1 + math.fsum(check_survival(survival))


def accept_length_iid(alpha: float, draft_tokens: int) -> float:
    """tau = (1 - alpha^(G+1)) / (1 - alpha), as a sum of powers so that alpha = 1 is no special case."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1] (given: {alpha:g})")
    return math.fsum(alpha**power for power in range(check_draft_tokens(draft_tokens) + 1))


def fit_alpha(accept_length: float, draft_tokens: int) -> float:
    """The alpha whose i.i.d. accept length is this one, by bisection (tau rises with alpha) to 1e-12."""
    tau = check_accept_length(accept_length, draft_tokens)
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if accept_length_iid(middle, draft_tokens) < tau:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def slot_pays(survival: float, extra_ms: float, accept_length: float, step_ms: float) -> bool:
    """Whether one more draft token pays: s_j > dT_step(j) * tau / T_step, with tau and T_step before it is added."""
    if not 0 <= survival <= 1:
        raise ValueError(f"survival must lie in [0, 1] (given: {survival:g})")
    if not math.isfinite(extra_ms) or extra_ms < 0:
        raise ValueError(f"slot ms must not be negative (given: {extra_ms:g})")
    return survival > extra_ms * check_accept_length(accept_length) / _positive("step ms", step_ms)


@dataclass(frozen=True)
class Choice:
    """One candidate for G."""

    draft_tokens: int
    accept_length: float  # bonus included
    step_ms: float
    tokens_per_second: float
    speedup: float
    slot_pays: bool  # this slot against one fewer
    best: bool  # the fastest of the list

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def best_draft_tokens(survival: Sequence[float], steps_ms: Sequence[float]) -> int:
    """argmax over G of (1 + sum of s_j up to G) / T_step(G); `steps_ms[G-1]` is the step at G. Ties: the smaller G."""
    rates = check_survival(survival)
    if len(steps_ms) != len(rates):
        raise ValueError(f"{len(rates)} survival numbers need as many step times (given: {len(steps_ms)})")
    speeds = [tokens_per_second(1 + math.fsum(rates[:count]), step) for count, step in enumerate(steps_ms, start=1)]
    return 1 + speeds.index(max(speeds))


def choices(survival: Sequence[float], step_ms: float, slot_ms: float, plain_ms: float) -> list[Choice]:
    """Every G up to len(survival), when `step_ms` holds at the last and each draft token costs `slot_ms`."""
    rates = check_survival(survival)
    count = len(rates)
    if not math.isfinite(slot_ms) or slot_ms < 0:
        raise ValueError(f"slot ms must not be negative (given: {slot_ms:g})")
    if (bare := _positive("step ms", step_ms) - count * slot_ms) <= 0:
        raise ValueError(f"{count} draft tokens of {slot_ms:g} ms are longer than the whole step of {step_ms:g} ms")
    steps = [bare + slot * slot_ms for slot in range(count + 1)]
    taus = [1 + math.fsum(rates[:slot]) for slot in range(count + 1)]
    best = best_draft_tokens(rates, steps[1:])
    return [
        Choice(
            draft_tokens=slot,
            accept_length=taus[slot],
            step_ms=steps[slot],
            tokens_per_second=tokens_per_second(taus[slot], steps[slot]),
            speedup=speedup(taus[slot], steps[slot], plain_ms),
            slot_pays=slot_pays(rates[slot - 1], slot_ms, taus[slot - 1], steps[slot - 1]),
            best=slot == best,
        )
        for slot in range(1, count + 1)
    ]
