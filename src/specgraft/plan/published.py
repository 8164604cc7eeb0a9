"""A published deployment, recomputed (algorithms 6.3): what the cost model reproduces of it, and what it cannot.

The figures are those of one DSpark deployment (a case study attributed to Sionic; quoted, the original text was not
available). Accept lengths include the bonus token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from specgraft.plan import breakeven as cost

Status = Literal[
    "reproduced",  # within 2 % of the published figure
    "not reproduced",
    "not derivable",  # the published figures do not determine it
    "inconsistent",  # the published figures contradict each other under the model
    "prediction only",  # no figure was published
    "comparison",  # of two published figures, no model
]
TOLERANCE = 0.02

PLAIN_TPS = 299.4  # tokens/s without a drafter
START_TPS = 130.0  # first speed with a drafter
PILOT_TAU, PILOT_TPS_LOW, PILOT_TPS_HIGH = 1.83, 196.0, 218.0  # 6.4K samples
TRAINER_TAU = 1.853  # what the trainer said of the same drafter
MIDDLE_TAU, MIDDLE_G = 2.32, 3  # 150K samples
FINAL_TAU, FINAL_G = 3.54, 7  # 500K samples, 2 epochs
STEP_MS, STEP_TPS = 8.4, 425.8  # before the runtime work
FAST_MS, FAST_TPS = 7.46, 472.8  # after it
FIXED_MS, FAST_FIXED_MS = 7.53, 6.0
START_GAIN = 3.64  # final over start, as printed
BREAK_EVEN_LOW, BREAK_EVEN_HIGH = 2.5, 3.0


@dataclass(frozen=True)
class Published:
    """One row: the model's value beside the published one."""

    key: str
    quantity: str
    model: float | None
    published: float | None
    unit: str
    status: Status
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative, signed; None where one side is missing."""
        if self.model is None or self.published is None:
            return None
        return self.model / self.published - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def _against(key: str, quantity: str, model: float, published: float, unit: str, note: str = "") -> Published:
    status: Status = "reproduced" if abs(model / published - 1) <= TOLERANCE else "not reproduced"
    return Published(key, quantity, model, published, unit, status, note)


def published_table() -> list[Published]:
    """Every row, computed now from the figures above."""
    return [*_speeds(), *_break_even(), *_steps(), *_open(), *_alphas()]


def _speeds() -> list[Published]:
    plain = cost.plain_step_ms(PLAIN_TPS)
    pilot = cost.tokens_per_second(PILOT_TAU, STEP_MS)
    rows = []
    for name, step, tps in (("before", STEP_MS, STEP_TPS), ("after", FAST_MS, FAST_TPS)):
        what = f"accept {FINAL_TAU} at {step} ms"
        speed, gain = cost.tokens_per_second(FINAL_TAU, step, FINAL_G), cost.speedup(FINAL_TAU, step, plain, FINAL_G)
        rows.append(_against(f"speed_{name}", what, speed, tps, "tokens/s"))
        rows.append(_against(f"speedup_{name}", f"{what}, over plain", gain, tps / PLAIN_TPS, "x"))
    what = f"pilot, accept {PILOT_TAU} at {STEP_MS} ms"
    assumed = "the pilot's step was not published, 8.4 ms assumed"
    needed = cost.implied_step_ms(PILOT_TAU, PILOT_TPS_LOW)
    rows += [
        _against("pilot_high", f"{what}, upper end", pilot, PILOT_TPS_HIGH, "tokens/s", assumed),
        _against("pilot_low", f"{what}, lower end", pilot, PILOT_TPS_LOW, "tokens/s", f"needs a {needed:.2f} ms step"),
        Published(
            "pilot_speedup",
            f"{what}, over plain",
            cost.speedup(PILOT_TAU, STEP_MS, plain),
            None,
            "x",
            "prediction only",
            "slower than no draft",
        ),
        _against(
            "final_over_start",
            "final over start",
            FAST_TPS / START_TPS,
            START_GAIN,
            "x",
            f"ratio of measurements; {STEP_TPS}/{START_TPS:g} = {STEP_TPS / START_TPS:.3f}",
        ),
    ]
    return rows


def _break_even() -> list[Published]:
    plain = cost.plain_step_ms(PLAIN_TPS)
    star, fast = cost.break_even(STEP_MS, plain), cost.break_even(FAST_MS, plain)
    longer = f"needs a {cost.largest_step_ms(BREAK_EVEN_HIGH, plain):.2f} ms step"
    at = f"break-even accept length at {STEP_MS} ms"
    return [
        _against("break_even_low", f"{at}, lower end", star, BREAK_EVEN_LOW, "tokens"),
        _against("break_even_high", f"{at}, upper end", star, BREAK_EVEN_HIGH, "tokens", longer),
        Published(
            "break_even_after",
            f"break-even accept length at {FAST_MS} ms",
            fast,
            None,
            "tokens",
            "prediction only",
            "runtime work lowers the bar",
        ),
    ]


def _steps() -> list[Published]:
    before, after = (cost.implied_step_ms(FINAL_TAU, tps, FINAL_G) for tps in (STEP_TPS, FAST_TPS))
    rest, fast_rest = STEP_MS - FIXED_MS, FAST_MS - FAST_FIXED_MS
    return [
        _against("implied_step_before", f"step implied by {STEP_TPS} tokens/s", before, STEP_MS, "ms"),
        _against("implied_step_after", f"step implied by {FAST_TPS} tokens/s", after, FAST_MS, "ms"),
        Published(
            "fixed_cost",
            "drop of the fixed cost, beside the drop of the step",
            FIXED_MS - FAST_FIXED_MS,
            STEP_MS - FAST_MS,
            "ms",
            "inconsistent",
            f"the rest would grow {rest:.2f} -> {fast_rest:.2f} ms "
            f"({rest / FINAL_G:.3f} -> {fast_rest / FINAL_G:.3f} ms per draft token)",
        ),
    ]


def _open() -> list[Published]:
    plain = cost.plain_step_ms(PLAIN_TPS)
    tau = START_TPS * STEP_MS / cost.MS
    rows = [
        Published(
            "start",
            "start speed",
            None,
            START_TPS,
            "tokens/s",
            "not derivable",
            f"needs accept {tau:.2f} at {STEP_MS} ms, or a {cost.implied_step_ms(PILOT_TAU, START_TPS):.1f} ms step "
            f"at {PILOT_TAU}",
        )
    ]
    for name, step in (("before", STEP_MS), ("after", FAST_MS)):
        gain = cost.speedup(MIDDLE_TAU, step, plain, MIDDLE_G)
        rows.append(
            Published(
                f"middle_{name}",
                f"accept {MIDDLE_TAU} (G={MIDDLE_G}) at {step} ms",
                cost.tokens_per_second(MIDDLE_TAU, step, MIDDLE_G),
                None,
                "tokens/s",
                "prediction only",
                f"{gain:.2f}x plain; a step of {MIDDLE_G} draft tokens is shorter",
            )
        )
    excess = (TRAINER_TAU - 1) / (PILOT_TAU - 1) - 1
    rows.append(
        Published(
            "trainer",
            "accept length, trainer beside serving",
            TRAINER_TAU,
            PILOT_TAU,
            "tokens",
            "comparison",
            f"{excess:+.1%} of the tokens beyond the bonus",
        )
    )
    return rows


def _alphas() -> list[Published]:
    rows = []
    pairs = (("final", FINAL_TAU, FINAL_G, MIDDLE_G), ("middle", MIDDLE_TAU, MIDDLE_G, FINAL_G))
    for name, tau, count, other in pairs:
        alpha = cost.fit_alpha(tau, count)
        there = cost.accept_length_iid(alpha, other)
        rows += [
            Published(f"alpha_{name}", f"i.i.d. acceptance, {tau} at G={count}", alpha, None, "", "prediction only"),
            Published(
                f"accept_length_{name}",
                f"the same at G={other}",
                there,
                None,
                "tokens",
                "prediction only",
                "a longer block alone changes accept length",
            ),
        ]
    return rows
