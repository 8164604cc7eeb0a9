"""A schedule at work in the decode loop: confidence logits -> calibrated chances -> drafts to verify, at this machine's costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specgraft.decode.costs import Costs
from specgraft.decode.schedule import Fixed, Late, Prefix, Schedule, Threshold
from specgraft.drafters.drafter import Drafter
from specgraft.ops.sampling import Law


@dataclass(frozen=True)
class Scaling:
    """What makes a chance of a confidence logit: sigmoid(logit / T_j + b_j). Fitted by `evaluate`, a pair [G] for each law."""

    temperatures: Sequence[float]  # T_j > 0, so a slot keeps its order
    shifts: Sequence[float]  # b_j


NAMES = ("fixed", "threshold", "prefix", "late")


@dataclass
class Scheduler:
    """State of one `decode` run; make a new one for the next (`make`)."""

    schedule: Schedule
    scalings: Mapping[float, Scaling] = field(default_factory=dict)  # by the law's temperature
    costs: Costs | None = None

    def check(self, drafter: Drafter) -> None:
        """Raises ValueError where this drafter's confidences cannot be scheduled."""
        if drafter.confidence_head is None:
            raise ValueError(
                f"a {drafter.config.kind} drafter without confidence head cannot be scheduled: evaluate.schedule=fixed"
            )
        if self.costs is None and isinstance(self.schedule, Prefix | Late):
            raise ValueError("the scheduler weighs drafts against costs: profile this machine first (decode.costs)")
        for scaling in self.scalings.values():
            if len(scaling.temperatures) != drafter.config.draft_tokens:
                raise ValueError(
                    f"confidence temperatures are for {len(scaling.temperatures)} draft tokens and the drafter proposes "
                    f"{drafter.config.draft_tokens}: run evaluate on this drafter"
                )

    def chances(self, confidence: torch.Tensor, laws: Sequence[Law]) -> list[list[float]]:
        """Calibrated chances [B,G] from confidence logits [B,G]; the scaling is the one fitted at the nearest law."""
        logits = confidence.double()
        if self.scalings:
            each = [self.scalings[min(self.scalings, key=lambda t: abs(t - law.temperature))] for law in laws]
            temperatures = torch.tensor([scaling.temperatures for scaling in each], dtype=torch.float64)
            shifts = torch.tensor([scaling.shifts for scaling in each], dtype=torch.float64)
            logits = logits.cpu() / temperatures + shifts
        return logits.sigmoid().tolist()

    def lengths(
        self, confidence: torch.Tensor, laws: Sequence[Law], room: Sequence[int], reach: int, keys: Sequence[Hashable]
    ) -> list[int]:
        """Drafts of each row to verify. room [B] >= 1 tokens are still wanted: drafts a row has no room for are never verified;
        `reach` is the longest committed text, keys [B] name the requests."""
        chances = [
            [chance if slot < wanted else 0.0 for slot, chance in enumerate(row, 1)]
            for row, wanted in zip(self.chances(confidence, laws), room, strict=True)
        ]
        costs, rows = self.costs, len(room)

        def rate(tokens: int) -> float:
            return 1.0 if costs is None else 1 / costs.seconds(rows, tokens, reach)

        found = self.schedule.lengths(chances, rate, keys)
        return [min(length, wanted - 1) for length, wanted in zip(found, room, strict=True)]


def make(name: str, scalings: Mapping[float, Scaling], costs: Costs | None, threshold: float) -> Scheduler:
    """A scheduler for one run. Raises ValueError for a name that does not exist."""
    kinds: dict[str, Callable[[], Schedule]] = {"fixed": Fixed, "threshold": lambda: Threshold(threshold), "prefix": Prefix, "late": Late}
    if name not in kinds:
        raise ValueError(f"evaluate.schedule={name!r}: known are {', '.join(NAMES)}")
    assert math.isfinite(threshold)
    return Scheduler(kinds[name](), scalings, costs)
