"""The loop under every schedule: the target's own greedy text, the target's own law, and a schedule that looks ahead is seen."""

from __future__ import annotations

import pytest
import torch
from test_sampled_exact import chi_square, exact_law, quantile
from test_schedule import Peeking

from specgraft.decode.costs import Costs
from specgraft.decode.loop import Request, Timing, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.decode.schedule import Late, Prefix, Threshold
from specgraft.decode.scheduler import NAMES, Scaling, Scheduler, make
from specgraft.ops.sampling import Law, uniforms
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate

ENDS = [1, 7, 20, 33]
LENGTHS = (3, 9, 5, 14, 2, 7, 11, 1)
COSTS = Costs({rows: {16: [(e, 1 + 0.06 * (rows + e)) for e in range(8 * rows)]} for rows in (1, 4, 16)})


def confident(drafter, scale=6.0, seed=4):
    """Confidences of all sizes that depend on the drafts before."""
    generator = torch.Generator().manual_seed(seed)
    proj = drafter.confidence_head.proj
    proj.weight.copy_(scale * torch.randn(proj.weight.shape, generator=generator) / proj.weight.shape[1] ** 0.5)
    return drafter


def prompts(seed=0, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def scheduler(name):
    return make(name, {0.0: Scaling([1.0, 2.0, 0.5, 1.0], [0.0, 0.5, -0.5, 0.0]), 1.0: Scaling([1.0] * 4, [0.0] * 4)}, COSTS, 0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets(tiny_target, tiny_drafter, name, dtype):
    lengths, accepted = set(), 0
    for seed in range(2):
        target = tiny_target(dtype=dtype, seed=seed, end=ENDS)
        both = pair(target, confident(tiny_drafter(target)))
        plain = [PlainRequest(ids, 21) for ids in prompts(seed)]
        generate(target, plain, 4)
        for batch in (1, 3, 8):
            requests = [Request(ids, 21) for ids in prompts(seed)]
            decode(both, requests, batch, scheduler=scheduler(name))
            assert [request.output for request in requests] == [request.output for request in plain]
            verdicts = [v for request in requests for v in request.rounds]
            lengths |= {v.proposed for v in verdicts}
            accepted += sum(v.accepted for v in verdicts)
            assert all(len(row) == 4 for request in requests for row in request.confidence)
            for request in requests:
                left = 20
                for v in request.rounds:
                    assert v.accepted <= v.proposed < max(left, 5 if name == "fixed" else 0) and v.accepted <= left
                    left -= len(v.committed)
    assert accepted > 30
    if name != "fixed":
        assert len(lengths) >= 4, "rows must differ for this test to mean anything"


def test_all_drafts_by_schedule_are_all_drafts(tiny_target, tiny_drafter):
    """Temperatures and costs that let everything in change nothing but drafts for which there is no room."""
    target = tiny_target(dtype=torch.float64, end=ENDS)
    both = pair(target, confident(tiny_drafter(target)))

    def run(scheduled):
        requests = [
            Request(ids, 12, Law(1.0), uniforms(0, str(number), uniform_count(12, 4))) for number, ids in enumerate(prompts())
        ]
        decode(both, requests, 3, scheduler=scheduled)
        return [request.output[:8] for request in requests]  # up to there all have room

    free = Costs({1: {16: [(0, 1.0), (100, 1.0)]}})
    assert run(None) == run(make("fixed", {}, None, 0.0)) == run(make("prefix", {}, free, 0.0))


def test_only_what_is_verified_is_computed(tiny_target, tiny_drafter, monkeypatch):
    target = tiny_target(dtype=torch.float64, end=ENDS)
    both = pair(target, confident(tiny_drafter(target)))
    seen = []
    run = target.lean().run

    def counting(ids, *args):
        seen.append(ids.numel())
        return run(ids, *args)

    monkeypatch.setattr(target.lean(), "run", counting)
    requests, timing = [Request(ids, 12) for ids in prompts()], Timing()
    decode(both, requests, 8, timing=timing, scheduler=scheduler("threshold"))
    rounds = [v for request in requests for v in request.rounds]
    assert sum(seen[1:]) == sum(1 + v.proposed for v in rounds) == sum(tokens for _, tokens, _, _ in timing.passes)
    assert any(8 < tokens < 40 for rows, tokens, _, _ in timing.passes if rows == 8), "a pass of unlike rows"


def test_what_does_not_fit_is_refused(tiny_target, tiny_drafter):
    target = tiny_target()
    request = Request([3, 4], 4)
    with pytest.raises(ValueError, match=r"known are fixed, threshold, prefix, late"):
        make("greedy", {}, None, 0.5)
    with pytest.raises(ValueError, match="profile this machine"):
        decode(pair(target, tiny_drafter(target)), [request], 1, scheduler=make("prefix", {}, None, 0.5))
    with pytest.raises(ValueError, match="for 3 draft tokens and the drafter proposes 4"):
        decode(pair(target, tiny_drafter(target)), [request], 1, scheduler=make("late", {0.0: Scaling([1.0] * 3, [0.0] * 3)}, COSTS, 0.5))
    without = tiny_drafter(target, confidence=False)
    with pytest.raises(ValueError, match="without confidence head cannot be scheduled"):
        decode(pair(target, without), [request], 1, scheduler=make("threshold", {}, None, 0.5))


def test_chances_are_scaled_by_the_nearest_law():
    scaling = {0.0: Scaling([2.0, 1.0], [0.0, 1.0]), 1.0: Scaling([1.0, 1.0], [0.0, 0.0])}
    logits = torch.tensor([[2.0, -1.0]] * 3)
    found = torch.tensor(make("fixed", scaling, None, 0.0).chances(logits, [Law(), Law(1.3), Law(0.7)]))
    assert torch.allclose(found, torch.tensor([[1.0, 0.0], [2.0, -1.0], [2.0, -1.0]]).sigmoid())
    assert torch.allclose(torch.tensor(make("fixed", {}, None, 0.0).chances(logits, [Law()] * 3)), logits.sigmoid())


# -- sampled: chi-square against the exact law

VOCAB, NEW, DRAWS, PROMPT = 5, 3, 6000, [2, 4]


class Alone:
    """A schedule for every row by itself: what leaks through one row is not lost in a crowd."""

    def __init__(self, make):
        self.make, self.of = make, {}

    def lengths(self, chances, rate, keys):
        return [
            self.of.setdefault(key, self.make()).lengths([row], stair, [key])[0]
            for row, key in zip(chances, keys, strict=True)
        ]


def stair(tokens):
    """The first draft verified costs most of a second round, further ones little."""
    return 1 / (1.0, 1.75, 1.8)[tokens - 1]


@pytest.fixture(scope="module")
def toy(tiny_target, tiny_drafter):
    target = tiny_target(vocab=VOCAB, layers=2, end=0, spread=0.3, markov=8.0, seed=6)
    drafter = tiny_drafter(target, draft_tokens=2, rank=8, mask_token_id=1, bigram=0.5)
    # the Markov embedding is one-hot: a confidence by token before, so the second one depends on the first draft
    proj = drafter.confidence_head.proj
    proj.weight.zero_()[0, -8 : VOCAB - 8] = torch.logit(torch.tensor([0.95, 0.05, 0.6, 0.95, 0.05]))
    proj.bias.zero_()
    return pair(target, drafter)


def statistic(toy, schedule, batch):
    law = Law(1.0)
    requests = [Request(PROMPT, NEW + 1, law, uniforms(11, str(n), uniform_count(NEW + 1, 2))) for n in range(DRAWS)]
    costs = Costs({batch: {16: [(0, 1.0), (batch, 1.3), (2 * batch, 2.0)]}})
    decode(toy, requests, batch, scheduler=Scheduler(schedule, {}, costs))
    counts = dict.fromkeys(range(3), 0)
    for request in requests:
        for verdict in request.rounds[:1]:
            counts[verdict.proposed] += 1
    value, freedom = chi_square(exact_law(toy.target, law), [tuple(request.output[:NEW]) for request in requests])
    return value, quantile(freedom), counts


@pytest.mark.parametrize(
    ("name", "schedule", "batch"),
    [
        ("threshold", Threshold(0.5), 500),
        ("prefix", Prefix(), 500),
        ("prefix, few rows", Prefix(), 20),
        ("late", Late(), 500),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sampled_text_has_the_exact_law(toy, name, schedule, batch):
    value, limit, counts = statistic(toy, schedule, batch)
    assert value < limit
    assert min(counts[0], counts[2]) > 100, "rows must differ"


def test_looking_ahead_is_seen(toy):
    value, limit, counts = statistic(toy, Alone(Peeking), 500)
    assert min(counts[0], counts[2]) > 100
    assert value > 1.5 * limit
