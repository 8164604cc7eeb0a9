"""How many drafts of each row are verified: fixed, by threshold, or by the hardware-aware scheduler (DSpark 3.2 and 5.2).

Pure decisions on numbers. The committed text keeps the target's law as long as a schedule is causal: whether slot j of a
row is verified may depend on drafts 1..j-1 of that row, on drafts of other rows that were let in before, and on rounds
that are over, never on draft j or later (algorithms.md 5.3). Confidence j reads drafts before j only, so a walk that
lets slots in one by one, each from what it has let in so far, is causal; a search that looks ahead is not.
Legend: R rows, G draft tokens. `chances` [R,G]: calibrated chance that draft j is accepted, given that those before it were.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Chances = Sequence[Sequence[float]]
Rate = Callable[[int], float]  # rounds per second when n tokens are verified, the anchor of each row included


class Schedule(Protocol):
    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        """Drafts to verify, 0 to G for each row; keys [R] name the requests, for schedules that remember."""


def survival(chances: Chances) -> list[list[float]]:
    """a [R,G]: chance that the first j drafts are all accepted."""
    return [list(itertools.accumulate(row, lambda before, chance: before * chance)) for row in chances]


def candidates(reach: Chances) -> list[tuple[int, int]]:
    """(row, slot from 1) of every a > 0 in [R,G], the likeliest first, ties by smaller slot, then row.

    a never rises along a row, so each row's slots come in order: a prefix of the list is a prefix of every row.
    """
    order = sorted(
        (-value, slot, row) for row, values in enumerate(reach) for slot, value in enumerate(values, 1) if value > 0
    )
    return [(row, slot) for _, slot, row in order]


def walk(reach: Chances, rate: Rate, ahead: bool = False) -> list[int]:
    """Algorithm 1: lets candidates in while expected tokens per second rise; a [R,G] -> lengths [R].

    It stops at the first candidate that does not pay, having read no a behind it. With `ahead` it goes to the end and
    takes the best place, which is the optimum but reads drafts it then leaves out: for confidences of past rounds only.
    """
    rows, order = len(reach), candidates(reach)
    expected = float(rows)
    best, count = expected * rate(rows), 0
    for place, (row, slot) in enumerate(order, 1):
        expected += reach[row][slot - 1]
        value = expected * rate(rows + place)
        if value > best:
            best, count = value, place
        elif not ahead:
            break
    return _let_in(order[:count], rows)


def likeliest(reach: Chances, budget: int) -> list[int]:
    """Lengths [R] when the `budget` likeliest candidates are let in."""
    return _let_in(candidates(reach)[:budget], len(reach))


def _let_in(chosen: Sequence[tuple[int, int]], rows: int) -> list[int]:
    lengths = [0] * rows
    for row, slot in chosen:
        lengths[row] = slot
    return lengths


def enumerated(reach: Chances, rate: Rate) -> list[int]:
    """The definition `walk(.., ahead=True)` is tested against: the best of all (G+1)^R choices of lengths."""

    def value(lengths: tuple[int, ...]) -> float:
        expected = sum(1 + sum(values[:length]) for values, length in zip(reach, lengths, strict=True))
        return expected * rate(sum(1 + length for length in lengths))

    every: list[tuple[int, ...]] = list(itertools.product(*(range(len(values) + 1) for values in reach)))
    winner = max(every, key=value)
    return list(winner)


@dataclass(frozen=True)
class Fixed:
    """All drafts, always."""

    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        return [len(row) for row in chances]


@dataclass(frozen=True)
class Threshold:
    """Each row up to its first chance below `least`, whatever it costs."""

    least: float

    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        return [len(list(itertools.takewhile(lambda chance: chance >= self.least, row))) for row in chances]


@dataclass(frozen=True)
class Prefix:
    """Algorithm 1 on this round's confidences, stopping at the first candidate that does not pay."""

    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        return walk(survival(chances), rate)


@dataclass
class Late:
    """The production variant (algorithms.md 5.4): confidences of two rounds ago, searched to the end, set how many drafts are
    verified in all; this round's confidences only say which. A row that was not there two rounds ago counts as sure."""

    past: deque[dict[Hashable, list[float]]] = field(default_factory=lambda: deque(maxlen=2))  # a, by request

    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        reach = survival(chances)
        old = self.past[0] if len(self.past) == 2 else {}
        stale = [old.get(key, [1.0] * len(row)) for key, row in zip(keys, reach, strict=True)]
        budget = sum(walk(stale, rate, ahead=True))
        self.past.append(dict(zip(keys, reach, strict=True)))
        return likeliest(reach, budget)
