"""Cost tables: what lies between the measured points, one hill, and the profile of a loop whose clock is made up."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from specgraft.decode import loop
from specgraft.decode.costs import Costs, hull
from specgraft.decode.pair import pair
from specgraft.decode.profile import levels, profile
from specgraft.decode.schedule import survival, walk
from specgraft.ops.sampling import Law


def test_between_and_beyond_the_points():
    costs = Costs({1: {100: [(0, 1.0), (2, 2.0)]}, 4: {100: [(0, 2.0), (8, 4.0)], 200: [(0, 4.0), (8, 6.0)]}})
    assert costs.seconds(1, 2, 0) == pytest.approx(1.5) and costs.seconds(1, 2, 999) == pytest.approx(1.5)
    assert costs.seconds(1, 6, 100) == pytest.approx(3.5), "beyond the last point along the last slope"
    assert costs.seconds(4, 8, 150) == pytest.approx(4.0)
    assert costs.seconds(2, 4, 100) == pytest.approx(2 / 3 * 2.0 + 1 / 3 * 2.5)
    assert costs.seconds(64, 68, 100) == costs.seconds(4, 8, 100), "constant beyond the rows measured"
    assert Costs.from_json(costs.to_json()) == costs


def test_hull_golden():
    assert hull([(0, 1.0), (1, 3.0), (2, 2.0), (4, 5.0)]) == [(0, 1.0), (2, 2.0), (4, 5.0)]
    assert hull([(0, 2.0), (1, 1.0)]) == [(0, 1.0), (1, 1.0)]
    assert hull([(3, 1.0)]) == [(3, 1.0)]


@pytest.mark.parametrize("seed", range(30))
def test_under_a_hull_stopping_early_loses_nothing(seed):
    source = random.Random(seed)
    points = [(e, 1 + 0.1 * e + 0.3 * source.random()) for e in range(0, 13, 2)]
    curve = hull(points)
    assert all(low <= high for (_, low), (_, high) in itertools.pairwise(curve))
    costs = Costs({3: {1: curve}})
    assert all(costs.seconds(3, 3 + e, 1) <= seconds + 1e-12 for e, seconds in points)
    reach = survival([[source.random() for _ in range(4)] for _ in range(3)])

    def rate(tokens):
        return 1 / costs.seconds(3, tokens, 1)

    def value(lengths):
        kept = sum(1 + sum(row[:length]) for row, length in zip(reach, lengths, strict=True))
        return kept * rate(3 + sum(lengths))

    assert value(walk(reach, rate)) == pytest.approx(value(walk(reach, rate, ahead=True)), rel=1e-12)


def test_levels():
    assert levels(1, 7) == [0, 1, 2, 3, 5, 7] and levels(4, 4) == [0, 2, 4, 8, 12, 16]


@pytest.mark.parametrize("law", [Law(), Law(1.0)])
def test_the_profile_is_what_the_clock_says(tiny_target, tiny_drafter, monkeypatch, law):
    """A clock that goes by tokens computed and by rows, not by time: the table gives it back."""
    target = tiny_target(end=[1, 7])
    both = pair(target, tiny_drafter(target))
    now, run, draft = [0.0], target.lean().run, both.drafter.draft

    def counting(ids, *args):
        now[0] += 0.001 * ids.numel()
        return run(ids, *args)

    def drafting(shared, cache, rows, *args):
        now[0] += 0.01 * len(rows)
        return draft(shared, cache, rows, *args)

    monkeypatch.setattr(target.lean(), "run", counting)
    monkeypatch.setattr(both.drafter, "draft", drafting)
    monkeypatch.setattr(loop, "clock", lambda: now[0])
    steps = []
    costs = profile(both, [[5, 9, 3], [2, 4]], (1, 3), (16, 64), law, 2, lambda: steps.append(1))
    assert len(steps) == 4 and costs.about["temperature"] == law.temperature
    for rows, context in itertools.product((1, 2, 3), (10, 16, 40, 64)):
        for drafts in range(4 * rows + 1):
            assert costs.seconds(rows, rows + drafts, context) == pytest.approx(0.01 * rows + 0.001 * (rows + drafts))
    state = torch.random.get_rng_state()
    profile(both, [[5, 9, 3]], (1,), (16,), law, 1)
    assert torch.equal(state, torch.random.get_rng_state())
