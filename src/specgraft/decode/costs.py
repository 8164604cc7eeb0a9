"""What a round of the decode loop costs on this machine, as a function of the tokens it verifies.

Measured on the loop itself (drafting, the packed pass, laws, accept rule, context), not on a model of it: see `profile`.
Legend: R rows, n tokens verified (the anchor of each row included), e = n - R of them drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Points = list[tuple[float, float]]  # (e, seconds), e ascending


@dataclass(frozen=True)
class Costs:
    """Seconds of a round, by rows and context length at both of which it was measured. Between them linear.

    Along e each curve is made to rise and to bend upward only (`hull`): what remains is no more than was measured, and then
    expected tokens per second has one hill, so stopping at the first draft that does not pay is the optimum of the table.
    """

    curves: Mapping[int, Mapping[int, Points]]  # rows -> context -> points
    about: Mapping[str, Any] = field(default_factory=dict)

    def seconds(self, rows: int, tokens: int, context: int) -> float:
        """Of one round; beyond what was measured along the last slope."""
        by_rows = []
        for count, by in self.curves.items():
            at = [(length, _along(points, tokens - rows)) for length, points in by.items()]
            by_rows.append((count, _between(at, context)))
        return _between(by_rows, rows)

    def to_json(self) -> dict[str, Any]:
        curves = [
            {"rows": rows, "context": context, "drafts": [e for e, _ in points], "seconds": [s for _, s in points]}
            for rows, by in self.curves.items()
            for context, points in by.items()
        ]
        return {"about": dict(self.about), "curves": curves}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Costs:
        curves: dict[int, dict[int, Points]] = {}
        for row in data["curves"]:
            points = list(zip(row["drafts"], row["seconds"], strict=True))
            curves.setdefault(row["rows"], {})[row["context"]] = points
        return cls(curves, data["about"])


def _along(points: Points, e: float) -> float:
    """Piecewise linear; one point is a constant."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(bisect_right(points, (e, float("inf"))), 1), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (e - left) / (right - left)


def _between(values: Sequence[tuple[int, float]], at: float) -> float:
    """Linear between the measured places, constant outside."""
    points: Points = sorted((float(place), value) for place, value in values)
    return _along(points, min(max(at, points[0][0]), points[-1][0]))


def hull(points: Points) -> Points:
    """The greatest curve that is nowhere above the points, never falls, and bends upward only."""
    ordered = sorted(points)
    least = float("inf")
    rising: Points = []
    for e, seconds in reversed(ordered):  # a cheaper round further on can always be had by verifying more
        least = min(least, seconds)
        rising.append((e, least))
    kept: Points = []
    for point in reversed(rising):
        while len(kept) >= 2 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
