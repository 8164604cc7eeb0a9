"""Gate "engine agreement": the served accept length is the decode loop's on the same prompts."""

from __future__ import annotations

from specgraft.records import GateResult


def engine_agreement(engine: float | None, loop: float, largest: float) -> GateResult:
    """Compares pooled accept lengths at T=0, `largest` being the largest relative difference."""
    if engine is None:
        return GateResult("engine agreement", False, "the engine counted no verify pass: is the drafter used?", {"loop": loop})
    gap = abs(engine - loop) / loop
    measured = {"engine": engine, "loop": loop, "difference": gap}
    detail = f"pooled accept length {engine:.3f} in the engine, {loop:.3f} in the decode loop on the same prompts ({gap:.1%} apart, at most {largest:.0%})"
    return GateResult("engine agreement", gap <= largest, detail, measured)
