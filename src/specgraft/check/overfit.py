"""Gate "overfit": a drafter trained on one answer until it knows it is then really accepted by draft -> verify."""

from __future__ import annotations

from collections.abc import Sequence

from specgraft.records import GateResult, Verdict

SHARE = 0.95  # of the longest accept length possible, G + 1


def overfit(accept_length: float | None, draft_tokens: int) -> GateResult:
    """Judges the accept length (bonus included, last round left out: see `whole_rounds`) on the text trained on.

    This is where block positions, masks, taps and heads meet the real target: a drafter that knows the answer by heart
    fails only where decoding does not do what training did.
    """
    wanted = SHARE * (draft_tokens + 1)
    if accept_length is None:
        return GateResult("overfit", False, "not run: no whole round was decoded", {"needed": wanted})
    detail = f"accept length {accept_length:.3f} on the answer trained on, at least {wanted:.2f} of {draft_tokens + 1} is needed"
    return GateResult("overfit", accept_length >= wanted, detail, {"accept_length": accept_length, "needed": wanted})


def whole_rounds(rounds: Sequence[Verdict]) -> float | None:
    """Accept length of a request without its last round, which the end of the text cuts; None where there is no other."""
    whole = rounds[:-1]
    return sum(len(verdict.committed) for verdict in whole) / len(whole) if whole else None
