"""Schedules against their definition, and the law of what is committed under each of them, by exact enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from specgraft.decode.schedule import (
    Fixed,
    Late,
    Prefix,
    Threshold,
    candidates,
    enumerated,
    likeliest,
    survival,
    walk,
)


def table(*values):
    """A rate from its values at 1, 2, .. tokens."""
    return lambda tokens: values[tokens - 1]


def affine(fixed, each):
    return lambda tokens: 1 / (fixed + each * tokens)


def jagged(seed):
    """A cost that only rises, by steps of any size."""
    steps = random.Random(seed)
    costs = list(itertools.accumulate([1.0] + [steps.choice([0, 0.01, 0.1, 1]) * steps.random() for _ in range(40)]))
    return lambda tokens: 1 / costs[tokens]


def stair(step, rows):
    """The first draft that is verified costs `step` rounds, further ones next to nothing: looking ahead pays often."""
    return lambda tokens: 1 / (1.0 + (step + 0.01 * tokens if tokens > rows else 0.0))


def drawn_chances(seed, rows, size):
    source = random.Random(seed)
    return [[source.choice([source.random(), 0.5, 1.0, 0.001]) for _ in range(size)] for _ in range(rows)]


class Peeking:
    """The forbidden one: searches this round's confidences to the end. Lives here only."""

    def lengths(self, chances, rate, keys):
        return walk(survival(chances), rate, ahead=True)


# -- decisions


def test_golden():
    rate = table(1, 0.5, 0.45)
    for second in (0.0, 0.5, 0.9, 1.0):
        assert Prefix().lengths([[0.8, second]], rate, [0]) == [0]
    assert Peeking().lengths([[0.8, 0.9]], rate, [0]) == [2]
    assert Peeking().lengths([[0.8, 0.0]], rate, [0]) == [0]
    assert enumerated([[0.8, 0.72]], rate) == [2] and enumerated([[0.8, 0.0]], rate) == [0]


def test_candidates_come_likeliest_first_and_in_order_along_a_row():
    assert candidates([[0.5, 0.5, 0.0], [0.9, 0.5, 0.1]]) == [(1, 1), (0, 1), (0, 2), (1, 2), (1, 3)]
    assert likeliest([[0.5, 0.5, 0.0], [0.9, 0.5, 0.1]], 3) == [2, 1]
    assert likeliest([[0.5, 0.5, 0.0]], 9) == [2]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("rows,size", [(1, 4), (2, 3), (3, 2)])
def test_the_search_to_the_end_is_the_optimum_and_the_causal_walk_a_prefix_of_it(rows, size, seed):
    reach = survival(drawn_chances(seed, rows, size))
    for number, rate in enumerate((affine(1, 0.2), affine(1, 0.01), jagged(seed), stair(0.5, rows))):

        def value(lengths, rate=rate):
            kept = sum(1 + sum(row[:length]) for row, length in zip(reach, lengths, strict=True))
            return kept * rate(rows + sum(lengths))

        full, early = walk(reach, rate, ahead=True), walk(reach, rate)
        assert value(full) == pytest.approx(value(enumerated(reach, rate)), rel=1e-12)
        assert likeliest(reach, sum(early)) == early, "the walk lets in the likeliest"
        assert all(a <= b for a, b in zip(early, full, strict=True))
        if number < 2:  # cost convex, a falling: one hill, and stopping at its top loses nothing
            assert value(early) == pytest.approx(value(full), rel=1e-12)


@pytest.mark.parametrize("schedule", [Prefix(), Threshold(0.4)])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_behind_the_first_slot_left_out_is_read(schedule, seed):
    """Whatever the confidences behind a row's end had been, the same slots would have been let in. Those behind the
    slot that was refused have not been looked at: that slot's own confidence has."""
    chances, rate, other = drawn_chances(seed, 2, 3), stair(0.5, 2), random.Random(seed + 1)
    lengths = schedule.lengths(chances, rate, [0, 1])
    for _ in range(5):
        changed = [
            [chance if slot <= length else other.random() for slot, chance in enumerate(row)]
            for row, length in zip(chances, lengths, strict=True)
        ]
        assert schedule.lengths(changed, rate, [0, 1]) == lengths


def test_threshold_and_fixed():
    chances = [[0.9, 0.5, 0.9], [0.3, 0.9, 0.9], [0.5, 0.5, 0.5]]
    assert Threshold(0.5).lengths(chances, affine(1, 1), "abc") == [3, 0, 3]
    assert Threshold(0.6).lengths(chances, affine(1, 1), "abc") == [1, 0, 0]
    assert (
        Threshold(0.0).lengths(chances, affine(1, 1), "abc") == Fixed().lengths(chances, affine(1, 1), "abc") == [3] * 3
    )


def test_late_takes_its_budget_from_two_rounds_ago_and_its_order_from_now():
    schedule, rate = Late(), affine(1, 0.4)
    sure, hopeless = [[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]
    assert schedule.lengths(hopeless, rate, "ab") == [0, 0]  # budget 4, no candidate
    assert schedule.lengths(sure, rate, "ab") == [2, 2]  # nothing is known yet: verify all
    assert schedule.lengths(sure, rate, "ab") == [0, 0]  # two rounds ago it was hopeless
    assert schedule.lengths([[0.1, 0.1], [0.9, 0.9]], rate, "ab") == [2, 2]  # .. and then sure
    schedule.past[0] = {"a": [0.9, 0.0], "b": [0.9, 0.0]}
    assert schedule.lengths([[0.1, 0.1], [0.9, 0.9]], rate, "ab") == [0, 2]
    schedule.past[0] = {"a": [0.0, 0.0]}
    assert schedule.lengths([[0.5, 0.5], [0.5, 0.5]], rate, "ac") == [1, 1], "a new row counts as sure"


# -- laws, by enumeration


def emitted(p, q, drafts, length):
    """Law of the next len(drafts) tokens of one row, target tokens filling up what the round leaves: {text: chance}.

    p, q: text -> law of the next token. The accept rule of algorithms.md 4, with every branch weighed.
    """
    out: dict[tuple[int, ...], float] = {}

    def fill(text, chance):
        if len(text) == len(drafts):
            out[text] = out.get(text, 0.0) + chance
            return
        for token, share in enumerate(p(text)):
            fill((*text, token), chance * share)

    def go(text, chance):
        if len(text) == length:
            return fill(text, chance)
        target, drafter, draft = p(text), q(text), drafts[len(text)]
        taken = min(1.0, target[draft] / drafter[draft])
        go((*text, draft), chance * taken)
        residual = np.maximum(target - drafter, 0)
        if taken < 1:
            for token, share in enumerate(residual / residual.sum()):
                fill((*text, token), chance * (1 - taken) * share)

    go((), 1.0)
    return out


class Toy:
    """Rows with laws and confidences of their own, drawn by seed; confidence j depends on drafts before j."""

    def __init__(self, seed, rows, vocab, size):
        self.rows, self.vocab, self.size = rows, vocab, size
        source = np.random.default_rng(seed)
        texts = [text for length in range(size) for text in itertools.product(range(vocab), repeat=length)]
        self.p = [{text: source.dirichlet([1] * vocab) for text in texts} for _ in range(rows)]
        self.q = [{text: source.dirichlet([1] * vocab) for text in texts} for _ in range(rows)]
        levels = [0.1, 0.4, 0.6, 0.6, 0.8, 1.0]
        self.c = [{text: float(source.choice(levels)) for text in texts} for _ in range(rows)]
        self.known: dict[tuple[int, tuple[int, ...], int], dict[tuple[int, ...], float]] = {}

    def emitted(self, row, path, length):
        """`emitted` of one row, remembered."""
        if (row, path, length) not in self.known:
            law = emitted(self.p[row].__getitem__, self.q[row].__getitem__, path, length)
            self.known[row, path, length] = law
        return self.known[row, path, length]

    def law(self, choose):
        """Joint law of the next G tokens of all rows, when `choose(chances)` gives the lengths of a round."""
        paths = list(itertools.product(range(self.vocab), repeat=self.size))
        joint: dict[tuple[tuple[int, ...], ...], float] = {}
        for drafts in itertools.product(paths, repeat=self.rows):
            chance = 1.0
            for row, path in enumerate(drafts):
                for slot, token in enumerate(path):
                    chance *= self.q[row][path[:slot]][token]
            chances = [[self.c[row][path[:slot]] for slot in range(self.size)] for row, path in enumerate(drafts)]
            lengths = choose(chances)
            each = [self.emitted(row, path, lengths[row]) for row, path in enumerate(drafts)]
            for combination in itertools.product(*(law.items() for law in each)):
                key = tuple(text for text, _ in combination)
                joint[key] = joint.get(key, 0.0) + chance * math.prod(share for _, share in combination)
        return joint

    def target(self):
        """The same under the target alone: rows are independent."""
        paths = list(itertools.product(range(self.vocab), repeat=self.size))
        single = [
            {path: math.prod([self.p[row][path[:slot]][token] for slot, token in enumerate(path)]) for path in paths}
            for row in range(self.rows)
        ]
        return {
            key: math.prod(single[row][path] for row, path in enumerate(key))
            for key in itertools.product(paths, repeat=self.rows)
        }

    def gap(self, choose):
        law, target = self.law(choose), self.target()
        assert set(law) <= set(target)
        return max(abs(law.get(key, 0.0) - value) for key, value in target.items())


SHAPES = [(1, 4, 2), (1, 2, 4), (2, 2, 2), (2, 3, 2), (3, 2, 2)]  # rows, vocabulary, drafts


def old(seed, rows, size):
    """A schedule that has seen two rounds."""
    late = Late()
    for extra in (1, 2):
        late.lengths(drawn_chances(seed + extra, rows, size), affine(1, 0.1), range(rows))
    return late


@pytest.mark.parametrize("shape", SHAPES)
def test_the_committed_law_is_the_targets_unless_one_looks_ahead(shape):
    """Of all rows together: no row's text may tell anything about another's either."""
    rows, _, size = shape
    worst = 0.0
    for seed in range(6):
        toy = Toy(seed, *shape)
        for rate in (jagged(seed), *(stair(step * rows, rows) for step in (0.3, 0.6, 0.9))):
            for make in (Fixed, Prefix, lambda: Threshold(0.5), lambda seed=seed: old(seed, rows, size)):
                assert toy.gap(lambda chances, make=make, rate=rate: make().lengths(chances, rate, range(rows))) < 1e-12
            worst = max(worst, toy.gap(lambda chances, rate=rate: Peeking().lengths(chances, rate, ())))
    assert worst > 1e-3, "the same enumeration sees the bias of looking ahead"


def golden():
    toy = Toy(0, 1, 2, 2)
    toy.p = [dict.fromkeys(toy.p[0], np.array([0.7, 0.3]))]
    toy.q = [dict.fromkeys(toy.q[0], np.array([0.5, 0.5]))]
    toy.c = [{(): 0.8, (0,): 0.9, (1,): 0.0}]  # the second slot looks good only behind token 0
    return toy


def first(law):
    return [sum(chance for key, chance in law.items() if key[0][0] == token) for token in (0, 1)]


def test_golden_bias_of_looking_ahead():
    rate = table(1, 0.5, 0.45)
    ahead = golden().law(lambda chances: Peeking().lengths(chances, rate, ()))
    assert first(ahead) == pytest.approx([0.85, 0.15], abs=1e-12)
    causal = golden().law(lambda chances: Prefix().lengths(chances, rate, ()))
    assert first(causal) == pytest.approx([0.7, 0.3], abs=1e-12)


def test_reading_the_draft_itself_is_seen():
    """A confidence that knows its own draft biases even the static threshold: the confidence head must not."""
    toy = golden()
    own = toy.law(lambda chances: [2 if chances[0][1] > 0.5 else 0])  # slot 1 by the confidence that reads draft 1
    assert first(own)[0] > 0.8
