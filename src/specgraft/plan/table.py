"""The break-even numbers of one deployment as rows, for a terminal or a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specgraft.plan import breakeven as cost


@dataclass(frozen=True)
class Row:
    """One number."""

    key: str  # stable name, for JSON
    quantity: str
    value: float
    unit: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(speedup: float) -> str:
    """In words: does the drafter pay?"""
    if speedup > 1:
        return "faster than no draft"
    return "slower than no draft" if speedup < 1 else "neither faster nor slower than no draft"


def breakeven_table(
    *,
    plain_ms: float,
    step_ms: float | None = None,
    accept_length: float | None = None,
    draft_tokens: int | None = None,
    survival: Sequence[float] | None = None,
    measured_tokens_per_second: float | None = None,
) -> list[Row]:
    """Rows for what is known. The step is either given or implied by a measured speed and accept length.

    Without `accept_length` it is taken from `survival` (1 + sum). Raises ValueError when too little is given, or
    when the numbers contradict each other.
    """
    if survival is not None:
        rates = cost.check_survival(survival)
        if draft_tokens is not None and draft_tokens != len(rates):
            raise ValueError(f"survival has {len(rates)} numbers for {draft_tokens} draft tokens: give one each")
        draft_tokens = len(rates)
    tau, tau_note = accept_length, "given, bonus included"
    if tau is None and survival is not None:
        tau, tau_note = cost.accept_length_of_survival(survival), "1 + sum of survival, bonus included"
    if tau is not None:
        cost.check_accept_length(tau, draft_tokens)
    step_note = "given"
    if step_ms is None:
        if tau is None or measured_tokens_per_second is None:
            raise ValueError("give the step time, or a measured speed together with an accept length")
        step_ms, step_note = cost.implied_step_ms(tau, measured_tokens_per_second), "implied by the measured speed"

    star = cost.break_even(step_ms, plain_ms)
    rows = [
        Row("plain_ms", "plain step", plain_ms, "ms", f"{cost.MS / plain_ms:.2f} tokens/s without a drafter"),
        Row("step_ms", "step with drafter", step_ms, "ms", step_note),
        Row("break_even", "break-even accept length", star, "tokens", _reach(star, draft_tokens)),
    ]
    if tau is not None:
        rows += _gain(tau, tau_note, step_ms, plain_ms, draft_tokens)
    if survival is not None and accept_length is not None:
        summed = cost.accept_length_of_survival(survival)
        rows.append(Row("survival_accept_length", "1 + sum of survival", summed, "tokens", "beside the given one"))
    if measured_tokens_per_second is not None and tau is not None and step_note == "given":
        implied = cost.implied_step_ms(tau, measured_tokens_per_second)
        rows.append(
            Row("implied_step_ms", "step implied by the speed", implied, "ms", f"{implied / step_ms - 1:+.2%} of given")
        )
    return rows


def _reach(star: float, draft_tokens: int | None) -> str:
    if draft_tokens is None:
        return "tokens per round needed, bonus included"
    top = draft_tokens + 1
    return f"out of reach: {draft_tokens} draft tokens give at most {top}" if star > top else f"of at most {top}"


def _gain(tau: float, note: str, step_ms: float, plain_ms: float, draft_tokens: int | None) -> list[Row]:
    gain = cost.speedup(tau, step_ms, plain_ms, draft_tokens)
    rows = [
        Row("accept_length", "accept length", tau, "tokens", note),
        Row("tokens_per_second", "speed with drafter", cost.tokens_per_second(tau, step_ms), "tokens/s"),
        Row("speedup", "speedup", gain, "x", verdict(gain)),
        Row("largest_step_ms", "longest step that pays", tau * plain_ms, "ms", "at this accept length"),
    ]
    if draft_tokens is not None:
        alpha = cost.fit_alpha(tau, draft_tokens)
        rows.append(Row("alpha", "i.i.d. acceptance per slot", alpha, "", f"fitted at {draft_tokens} draft tokens"))
    return rows
