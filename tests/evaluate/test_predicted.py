"""Expected decoding rounds: enumeration on a toy chain, and equality with the decode loop on a tiny model."""

from __future__ import annotations

import pytest
import torch

from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.evaluate import metrics
from specgraft.evaluate.predicted import expected_rounds, occupancy, pooled, predict, slot_terms
from specgraft.ops.sampling import Law, uniforms

VOCAB, END, LIMIT = 3, 2, 5  # tokens behind the first anchor, at most


@pytest.fixture(scope="module")
def chain():
    generator = torch.Generator().manual_seed(4)
    p = torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64).pow(2).softmax(-1)
    q = (4 * torch.rand(4, VOCAB, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)  # by slot, by previous
    return p, q


def texts(p):
    """Every text behind token 0 and its chance."""

    def go(text, chance):
        if len(text) == LIMIT or (text and text[-1] == END):
            yield text, chance
            return
        previous = text[-1] if text else 0
        for token in range(VOCAB):
            yield from go((*text, token), chance * float(p[previous, token]))

    return list(go((), 1.0))


def terms(p, q, text, size):
    """accept and cost [L, G] of a text behind token 0."""
    whole, length = (0, *text), len(text) - 1
    accept, cost = torch.zeros(length, size, dtype=torch.float64), torch.zeros(length, size, dtype=torch.float64)
    for n in range(length):
        for t in range(n + 1, min(n + size, length) + 1):
            law_p, law_q = p[whole[t - 1]][None], q[t - n - 1, whole[t - 1]][None]
            a, c = slot_terms(law_p, law_q, torch.tensor([whole[t]]), (END,))
            accept[n, t - n - 1], cost[n, t - n - 1] = a[0], c[0]
    return accept, cost


def true_rounds(p, q, size):
    """Expected rounds of the draft -> verify process itself."""

    def round_from(previous, wanted):
        return 1 + slot_from(0, previous, wanted)

    def slot_from(slot, previous, wanted):
        total = 0.0
        for token in range(VOCAB):
            both = float(torch.minimum(p[previous, token], q[slot, previous, token]))
            over = float(p[previous, token]) - both
            if token == END or wanted == 1:
                continue
            total += over * round_from(token, wanted - 1)
            if slot + 1 < size:
                total += both * slot_from(slot + 1, token, wanted - 1)
            else:
                for bonus in range(VOCAB):
                    if bonus != END and wanted > 2:
                        total += both * float(p[token, bonus]) * round_from(bonus, wanted - 2)
        return total

    return round_from(0, LIMIT)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mean_over_texts_is_the_true_expectation(chain, size):
    p, q = chain
    exact = true_rounds(p, q, size)
    every = texts(p)
    assert sum(chance for _, chance in every) == pytest.approx(1)
    assert sum(c * expected_rounds(*terms(p, q, text, size)) for text, c in every) == pytest.approx(exact, abs=1e-12)
    # round starts counted along each text have the same mean
    starts = sum(c * sum(occupancy(terms(p, q, text, size)[0])) for text, c in every)
    assert starts == pytest.approx(exact, abs=1e-12)


def test_all_accepted_and_none_accepted():
    yes, no = torch.ones(7, 3), torch.zeros(7, 3)
    assert expected_rounds(yes, no) == 2.0  # 8 tokens: 4 and 4
    assert expected_rounds(no, yes) == 8.0
    assert occupancy(yes) == [1, 0, 0, 0, 1, 0, 0, 0]


ENDS = [1, 7, 20, 33]


def run(tiny_target, tiny_drafter, law, new, count, **shape):
    target = tiny_target(dtype=torch.float64, end=ENDS, **shape)
    both = pair(target, tiny_drafter(target))
    generator = torch.Generator().manual_seed(0)
    requests = [
        Request(
            torch.randint(2, target.vocab_size, (3 + number % 7,), generator=generator).tolist(),
            new,
            law,
            uniforms(3, str(number), uniform_count(new, 4)),
        )
        for number in range(count)
    ]
    decode(both, requests, 16)
    predictions = [predict(both, request.ids, request.output, law, chunk=5) for request in requests]
    return requests, predictions


def test_greedy_prediction_equals_the_loop_exactly(tiny_target, tiny_drafter):
    requests, predictions = run(tiny_target, tiny_drafter, Law(), 17, 12)
    for request, prediction in zip(requests, predictions, strict=True):
        assert (prediction.rounds if prediction else 0) == len(request.rounds)
    measured = metrics.accept_length_pooled([request.rounds for request in requests])
    assert measured > 1.5
    assert pooled(predictions) == pytest.approx(measured, abs=1e-12)


def test_sampled_prediction_is_near_the_loop(tiny_target, tiny_drafter):
    requests, predictions = run(tiny_target, tiny_drafter, Law(1.0), 12, 160)
    measured = metrics.accept_length_pooled([request.rounds for request in requests])
    assert measured > 1.2
    assert pooled(predictions) == pytest.approx(measured, rel=0.05)
