"""Sampled output has the target's law, whatever draws the drafts: exact enumeration against thousands of draws, and a
planted error is seen."""

from __future__ import annotations

import math

import pytest
import torch

from specgraft.decode import verify
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.ops.sampling import Law, distribution, uniforms

VOCAB, NEW, DRAWS, PROMPT = 5, 3, 6000, [2, 4]


def exact_law(target, law):
    """Chance of every answer of up to NEW tokens, from plain passes."""
    chances: dict[tuple[int, ...], float] = {}

    def go(text, chance):
        if len(text) == NEW or (text and text[-1] in target.end_ids):
            chances[text] = chance
            return
        ids = torch.tensor([[*PROMPT, *text]])
        step = target.forward(ids, target.cache(1, ids.shape[1]))
        p = distribution(target.logits(step.last[0, -1]), law.temperature, law.top_p, law.top_k).double()
        for token in range(VOCAB):
            if p[token] > 0:
                go((*text, token), chance * float(p[token] / p.sum()))

    go((), 1.0)
    return chances


def chi_square(chances, draws):
    """Statistic and degrees of freedom; cells that expect fewer than five draws are one cell."""
    counts: dict[tuple[int, ...], int] = {}
    for draw in draws:
        counts[draw] = counts.get(draw, 0) + 1
    assert set(counts) <= set(chances), "an answer of chance zero"
    cells, rare = [], [0.0, 0.0]
    for text, chance in chances.items():
        expected, seen = chance * len(draws), counts.get(text, 0)
        if expected >= 5:
            cells.append((expected, seen))
        else:
            rare = [rare[0] + expected, rare[1] + seen]
    if rare[0] >= 5:
        cells.append((rare[0], rare[1]))
    return sum((seen - expected) ** 2 / expected for expected, seen in cells), len(cells) - 1


def quantile(freedom, z=3.09):
    """Chi-square quantile at the normal quantile z (Wilson and Hilferty); 3.09: one in a thousand."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def drawn(both, law):
    requests = [Request(PROMPT, NEW, law, uniforms(11, str(number), uniform_count(NEW, 2))) for number in range(DRAWS)]
    decode(both, requests, 500)
    return requests


INDEPENDENT = {"dflash": {"kind": "dflash"}, "mtp": {"kind": "mtp"}}
MARKOV = {"vanilla": {"bigram": 0.5}, "gated": {"markov_head": "gated"}, "rnn": {"markov_head": "rnn"}}
KINDS = {**INDEPENDENT, **MARKOV}


@pytest.fixture(scope="module")
def make(tiny_target, tiny_drafter):
    target = tiny_target(vocab=VOCAB, layers=2, end=0, spread=0.3, markov=8.0, seed=6)

    def make(kind):
        drafter = tiny_drafter(target, draft_tokens=2, rank=8, mask_token_id=1, **{"bigram": 0.0, **KINDS[kind]})
        generator = torch.Generator().manual_seed(2)
        for name, parameter in drafter.named_parameters():
            if name.startswith("heads.") or (name.startswith("markov_head.") and kind != "vanilla"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))  # they start at zero
        return pair(target, drafter)

    return make


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        ("vanilla", Law(1.0)),
        ("vanilla", Law(1.3, 0.95, 4)),
        ("gated", Law(1.0)),
        ("rnn", Law(1.0)),
        ("dflash", Law(1.0)),
        ("mtp", Law(1.3, 0.95, 4)),
    ],
    ids=str,
)
def test_chi_square_against_the_exact_law(make, kind, law):
    both = make(kind)
    requests = drawn(both, law)
    verdicts = [v for request in requests for v in request.rounds]
    refused = sum(v.accepted < v.proposed and len(v.committed) > v.accepted for v in verdicts) / len(verdicts)
    assert 0.05 < refused < 0.95, "both branches of the rule must be taken"
    statistic, freedom = chi_square(exact_law(both.target, law), [tuple(request.output) for request in requests])
    assert freedom >= 5
    assert statistic < quantile(freedom)


@pytest.mark.parametrize("kind", ["vanilla", "mtp"])
def test_a_residual_left_out_is_seen(make, kind, monkeypatch):
    law, both = Law(1.0), make(kind)
    monkeypatch.setattr(verify, "behind", lambda p, q, accepted, *lengths: p[torch.arange(len(p)), accepted])
    statistic, freedom = chi_square(
        exact_law(both.target, law), [tuple(request.output) for request in drawn(both, law)]
    )
    assert statistic > 2 * quantile(freedom)
