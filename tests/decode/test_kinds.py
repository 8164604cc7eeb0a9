"""Every kind of drafter in the decode loop: the target's own text, whatever the batch, and as many rounds as predicted.

Small vocabularies: a random drafter is right now and then. Legend: V vocabulary, G draft tokens, r Markov rank.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specgraft.config import DistillSection
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.drafters.config import FULL, SLIDING
from specgraft.drafters.drafter import Texts
from specgraft.drafters.precision import at_precision
from specgraft.evaluate.predicted import predict
from specgraft.ops.sampling import Law, uniforms
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate

F64 = torch.float64
VOCAB, NEW, ENDS = 8, 14, [1]
WINDOW = {"layer_types": (SLIDING, FULL), "sliding_window": 6}
KINDS = {
    "mtp": {"kind": "mtp"},
    "mtp, sliding": {"kind": "mtp", **WINDOW},
    "dflash": {"kind": "dflash"},
    "dflash, sliding": {"kind": "dflash", **WINDOW},
    "dflash, causal": {"kind": "dflash", "block_causal": True},
    "dflash2": {"kind": "dflash2", "conv_group": 8, "selector_rank": 6, "selector_top_k": 4},
    "vanilla": {"markov_head": "vanilla"},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "no head": {"markov_rank": 0},
    "no confidence": {"confidence": False},
    "confidence of the state alone": {"confidence_with_markov": False},
    "sliding and causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6, "block_causal": True},
}
LENGTHS = (3, 9, 1, 14, 5, 8)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def requests_of(law=None, count=6):
    many = [prompts()[number % 6] for number in range(count)]
    if law is None:
        return [Request(ids, NEW) for ids in many]
    return [Request(ids, NEW, law, uniforms(0, str(n), uniform_count(NEW, 4))) for n, ids in enumerate(many)]


def make(tiny_target, tiny_drafter, name, dtype=F64):
    """Target and a random drafter of the kind, none of whose parameters is at a starting value."""
    target = tiny_target(vocab=VOCAB, dtype=dtype, end=ENDS, markov=8.0, spread=0.2, seed=2)
    drafter = tiny_drafter(target, rank=8, taps=(0, 2), bigram=0.0, **KINDS[name])
    generator = torch.Generator().manual_seed(7)
    for key, parameter in drafter.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=F64).to(dtype)
        parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.3 * noise)
    return target, drafter


def plain(target):
    requests = [PlainRequest(ids, NEW) for ids in prompts()]
    generate(target, requests, 4)
    return [request.output for request in requests]


@pytest.fixture(params=KINDS)
def both(request, tiny_target, tiny_drafter):
    return pair(*make(tiny_target, tiny_drafter, request.param))


def test_greedy_text_is_the_targets_and_rounds_are_as_predicted(both):
    requests = requests_of()
    decode(both, requests, 3)
    assert [request.output for request in requests] == plain(both.target)
    verdicts = [v for request in requests for v in request.rounds]
    assert sum(v.accepted for v in verdicts) >= 3, "drafts must be accepted for this test to mean anything"
    for request in requests:
        prediction = predict(both, request.ids, request.output, Law(), chunk=5)
        assert (prediction.rounds if prediction else 0) == len(request.rounds)
        logs = len(request.rounds) if both.drafter.confidence_head is not None else 0
        assert len(request.confidence) == logs and all(len(row) == 4 for row in request.confidence)


def test_sampled_text_does_not_depend_on_the_batch(both):
    laws = [Law(1.0), Law(0.7, 0.9, 5), Law(), Law(1.3)]

    def run(batch):
        requests = [
            dataclasses.replace(request, law=laws[number % 4], output=[], rounds=[], confidence=[])
            for number, request in enumerate(requests_of(Law(1.0)))
        ]
        decode(both, requests, batch)
        return requests

    one, many = run(1), run(4)
    assert [(r.output, r.rounds, r.finish_reason) for r in one] == [(r.output, r.rounds, r.finish_reason) for r in many]
    for a, b in zip(one, many, strict=True):
        assert torch.allclose(torch.tensor(a.confidence), torch.tensor(b.confidence), rtol=0, atol=1e-5)
    assert sum(v.accepted for request in one for v in request.rounds) > 5


@pytest.mark.parametrize("name", ["mtp", "dflash", "vanilla", "rnn", "no head"])
def test_sampled_rounds_are_near_the_predicted_ones(tiny_target, tiny_drafter, name):
    both = pair(*make(tiny_target, tiny_drafter, name))
    law = Law(1.0)
    requests = requests_of(law, 100)
    decode(both, requests, 50)
    over = []
    for request in requests:
        prediction = predict(both, request.ids, request.output, law)
        over.append(len(request.rounds) - (prediction.rounds if prediction else 0))
    gap = torch.tensor(over)
    assert gap.abs().max() > 0.5 and abs(float(gap.mean())) < 3.3 * float(gap.std()) / len(gap) ** 0.5


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_drafts_change_no_text(tiny_target, tiny_drafter, name):
    target, drafter = make(tiny_target, tiny_drafter, name, torch.float32)
    requests = requests_of()
    decode(pair(target, at_precision(drafter, torch.bfloat16)), requests, 3)
    assert [request.output for request in requests] == plain(target)
    assert sum(v.accepted for request in requests for v in request.rounds) >= 3


def learn_by_heart(target, drafter, ids, prompt):
    """Trains on one text by cross-entropy until it is known."""
    drafter.requires_grad_(True)
    shared = pair(target, drafter).shared
    step = target.forward(ids[None], target.cache(1, len(ids)), drafter.config.taps)
    texts = Texts(ids[None], step.taps.clone(), torch.zeros(1, len(ids), dtype=torch.long))
    position = torch.arange(prompt, len(ids) - 1)[None]
    mask = position[..., None] + torch.arange(1, 5) < len(ids)
    batch = Batch(texts, step.last.clone(), Anchors(position, torch.ones_like(position, dtype=torch.bool), mask))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(300):
        outcome = objective(drafter, shared, batch, DistillSection(preset="dflash", decay=100.0))
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if float(outcome.sums["ce"].sum() / outcome.sums["count"].sum()) < 0.05:
            break
    drafter.requires_grad_(False)


@pytest.mark.parametrize("name", ["mtp", "dflash", "rnn"])
def test_one_text_learnt_by_heart_is_accepted_in_full(tiny_target, tiny_drafter, name):
    """faults.md G4: a label, mask or position that is off by one learns just as well and is refused here."""
    target = tiny_target(vocab=16, end=15, markov=4.0, spread=0.15, seed=3)
    drafter = tiny_drafter(target, layers=1, rank=8, taps=(0, 2), bigram=0.0, **KINDS[name])
    request = PlainRequest([5, 9, 3, 2], 21)
    generate(target, [request], 1)
    assert len(set(request.output)) > 5
    learn_by_heart(target, drafter, torch.tensor(request.ids + request.output), 4)
    found = Request(request.ids, 21)
    decode(pair(target, drafter), [found], 1)
    assert found.output == request.output
    assert [v.accepted for v in found.rounds] == [4] * 4
