"""Profiles this machine: the loop itself is run with random drafts left out, and every round is timed (see `costs`).

Legend: R rows, G draft tokens, e drafts verified in a round.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from statistics import median

import torch

from specgraft.decode.costs import Costs, Points, hull
from specgraft.decode.loop import Request, Timing, decode, uniform_count
from specgraft.decode.pair import Pair
from specgraft.decode.schedule import Chances, Rate
from specgraft.decode.scheduler import Scheduler
from specgraft.ops.sampling import Law, uniforms

LEVELS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0)  # drafts a row
WARM = 2  # rounds that do not count


class _Enough(Exception):
    """All rounds have been timed: the rest of the texts need not be written."""


class _Drawn:
    """Verifies a drawn number of drafts, spread over the rows at random: all levels in random order, `repeats` times over.

    Rounds of fewer rows (texts that have ended) do not count and verify nothing.
    """

    def __init__(self, rows: int, levels: Sequence[int], repeats: int) -> None:
        self.rows, self.source = rows, random.Random(rows)
        self.left = [e for _ in range(repeats) for e in self.source.sample(levels, len(levels))] + [max(levels)] * WARM

    def lengths(self, chances: Chances, rate: Rate, keys: Sequence[Hashable]) -> list[int]:
        if not self.left:
            raise _Enough
        if len(chances) < self.rows:
            return [0] * len(chances)
        places = [row for row, values in enumerate(chances) for _ in values]
        chosen = self.source.sample(places, min(self.left.pop(), len(places)))
        return [chosen.count(row) for row in range(len(chances))]


def levels(rows: int, draft_tokens: int) -> list[int]:
    """Numbers of drafts e at which a round of so many rows is timed."""
    return sorted({min(round(level * rows), rows * draft_tokens) for level in (*LEVELS, draft_tokens)})


def profile(
    pair: Pair,
    texts: Sequence[list[int]],
    rows: Sequence[int] = (1, 4, 16),
    contexts: Sequence[int] = (128, 512),
    law: Law | None = None,
    repeats: int = 5,
    step: Callable[[], None] = lambda: None,
) -> Costs:
    """Costs of rounds at these rows and context lengths; `texts` are token ids to be continued, cut and repeated to length.

    `step` is called after every pair of rows and context. Draws nothing from any global random state.
    """
    law = law or Law()
    size = pair.drafter.config.draft_tokens
    stream = [token for text in texts for token in text]
    curves: dict[int, dict[int, Points]] = {}
    for count in rows:
        for context in contexts:
            seconds = _timed(pair, stream, count, context, law, levels(count, size), repeats)
            curves.setdefault(count, {})[context] = hull([(e, median(found)) for e, found in seconds.items()])
            step()
    about = {
        "machine": platform.machine(),
        "device": str(pair.target.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "temperature": law.temperature,
        "draft_tokens": size,
        "repeats": repeats,
    }
    return Costs(curves, about)


def _timed(
    pair: Pair, stream: list[int], rows: int, context: int, law: Law, wanted: list[int], repeats: int
) -> dict[int, list[float]]:
    """Seconds of rounds of all `rows`, by e; at least `repeats` of each."""
    size, rounds = pair.drafter.config.draft_tokens, WARM + repeats * len(wanted)
    seconds: dict[int, list[float]] = {}
    start = attempt = 0
    while missing := [e for e in wanted if len(seconds.get(e, ())) < repeats]:
        requests = []
        for number in range(3 * rows):  # some end early
            ids = [stream[(start + place) % len(stream)] for place in range(max(1, context - rounds // 2))]
            start += len(ids)
            new = rounds + size + 1  # one token a round at least, and room for all drafts in the last one
            uniform = uniforms(attempt, f"profile:{number}", uniform_count(new, size)) if law.temperature > 0 else None
            requests.append(Request(ids, new, law, uniform))
        timing = Timing()
        with suppress(_Enough):
            decode(pair, requests, rows, timing=timing, scheduler=Scheduler(_Drawn(rows, missing, repeats)))
        full = [(tokens - rows, spent) for there, tokens, _, spent in timing.passes if there == rows]
        for e, spent in full[WARM:]:
            if e in wanted:
                seconds.setdefault(e, []).append(spent)
        attempt += 1
        assert attempt < 200, "texts end before a round can be timed"
    return seconds
