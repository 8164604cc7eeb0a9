"""Gate "agreement": the accept length that training's forward predicts is the one the decode loop measures."""

from __future__ import annotations

from specgraft.records import GateResult


def agreement(predicted: float | None, pooled: float | None, tolerance: float = 0.05) -> GateResult:
    """Relative difference of the expected-rounds prediction and the pooled accept length on the same texts."""
    if predicted is None or not pooled:
        return GateResult("agreement", False, "not run: no accept length was measured")
    apart = abs(predicted - pooled) / pooled
    return GateResult(
        "agreement",
        apart <= tolerance + 1e-9,
        f"predicted accept length {predicted:.3f}, measured {pooled:.3f} (pooled): {apart:.2%} apart, at most {tolerance:.0%}",
        {"predicted": predicted, "pooled": pooled, "difference": apart, "tolerance": tolerance},
    )
