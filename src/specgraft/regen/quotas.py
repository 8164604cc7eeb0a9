"""Who gets how many: largest remainder, sources that run out, and an order in which families take turns. No float decides anything alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor
from typing import Any, TypeVar

from specgraft.records import Prompt
from specgraft.regen.builtin.family import stable_int

Key = TypeVar("Key", bound=Any)


def apportion(count: int, shares: Mapping[Key, float]) -> dict[Key, int]:
    """`count` seats by largest remainder; exact quotas are rounded to 9 digits so that float noise decides nothing.

    `shares` sum to 1. Ties go to the larger share, then to the smaller key.
    """
    quotas = {key: round(count * share, 9) for key, share in shares.items()}
    seats = {key: floor(quota) for key, quota in quotas.items()}
    by_remainder = sorted(shares, key=lambda key: (-round(quotas[key] - seats[key], 9), -shares[key], key))
    for key in by_remainder[: count - sum(seats.values())]:
        seats[key] += 1
    return seats


def share_out(count: int, weights: Mapping[Key, float], held: Mapping[Key, int]) -> dict[Key, int]:
    """`count` taken from holders by weight; one that holds less than its share gives all, and the others make up for it.

    Returns what each gives; the sum is less than `count` only where all together hold less.
    """
    given = dict.fromkeys(weights, 0)
    left, still = count, [key for key in weights if held.get(key, 0) > 0]
    while left > 0 and still:
        total = sum(weights[key] for key in still)
        seats = apportion(left, {key: weights[key] / total for key in still})
        short = [key for key in still if seats[key] >= held[key]]
        for key in short or still:
            given[key] = held[key] if short else seats[key]
            left -= given[key]
        still = [key for key in still if key not in short] if short else []
    return given


def in_turns(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """Families take turns, so that a small choice already holds many; families and their prompts are shuffled by `seed`."""
    by_family: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_family.setdefault(prompt.family, []).append(prompt)
    queues = []
    for family in sorted(by_family, key=lambda name: (stable_int(seed, name), name)):
        queues.append(sorted(by_family[family], key=lambda prompt: (stable_int(seed, prompt.id), prompt.id)))
    longest = max(map(len, queues), default=0)
    return [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
