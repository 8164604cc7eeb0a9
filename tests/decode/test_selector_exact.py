"""A law that is zero outside its candidates decodes exactly: enumerated, drawn, greedy; a planted error is seen."""

from __future__ import annotations

import math

import pytest
import torch

from specgraft.decode import verify
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.drafters.drafter import Texts
from specgraft.evaluate import metrics
from specgraft.evaluate.predicted import pooled, predict
from specgraft.ops.sampling import Law, distribution, uniforms
from specgraft.targets.generate import Request as Plain
from specgraft.targets.generate import generate

F64, NEW, PROMPT = torch.float64, 4, [2, 3]


def make(tiny_target, tiny_drafter, vocab, top_k, draft_tokens, dtype=torch.float32, markov=8.0, rank=6):
    """A pair with a selector that says something, and candidates that are not all tokens."""
    target = tiny_target(vocab=vocab, layers=2, end=0, spread=0.3, markov=markov, seed=6, dtype=dtype)
    drafter = tiny_drafter(
        target, kind="dflash2", draft_tokens=draft_tokens, mask_token_id=1, conv_group=8, selector_rank=rank, selector_top_k=top_k
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in drafter.named_parameters():
        if "selector" in name or "conv" in name:
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return pair(target, drafter)


def taught(both, strength=3.0):
    """The same pair with the target's own law after single tokens in the codebooks, so that drafts are accepted now and then."""
    target, selector, vocab = both.target, both.drafter.selector, both.target.vocab_size
    ids = torch.randint(2, vocab, (4, 9), generator=torch.Generator().manual_seed(0))
    step = target.forward(ids, target.cache(4, 9), both.drafter.config.taps)
    states = both.drafter(both.shared, Texts(ids, step.taps, torch.zeros_like(ids)), torch.full((4, 1), 8)).flatten(0, 2)
    mean = states.mean(0)
    single = target.forward(torch.arange(vocab)[:, None], target.cache(vocab, 1))
    law = (single.last[:, 0] @ both.shared.head.T).to(mean.dtype)
    selector.predecessor_codebook.data = torch.eye(vocab, dtype=mean.dtype)
    selector.successor_codebook.data = strength * law.T.contiguous()
    selector.hidden_projection.weight.data = (mean / (states @ mean).mean()).expand(vocab, -1).clone()  # about 1 for every state
    return both


class Laws:
    """Float64 laws of a pair behind every text; unlike in the loop, nothing is cached between texts but results."""

    def __init__(self, both):
        self.both, self.p_of, self.h_of = both, {}, {}

    def look(self, text):
        if text not in self.p_of:
            both, ids = self.both, torch.tensor([[*PROMPT, *text]])
            step = both.target.forward(ids, both.target.cache(1, ids.shape[1]), both.drafter.config.taps)
            self.p_of[text] = (step.last[0, -1] @ both.shared.head.T).softmax(-1)
            texts = Texts(ids, step.taps, torch.zeros_like(ids))
            self.h_of[text] = both.drafter(both.shared, texts, torch.tensor([[ids.shape[1] - 1]]))[0, 0]
        return text

    def p(self, text):
        return self.p_of[self.look(text)]

    def q(self, text, slot, previous):
        hidden = self.h_of[self.look(text)][slot : slot + 1]
        selector = self.both.drafter.selector
        return selector.logits(hidden @ self.both.shared.head.T, hidden, torch.tensor([previous])).softmax(-1)[0]


def output_law(laws, size, new):
    """Chance of every answer of `new` tokens by the draft and verify rounds themselves."""
    out: dict[tuple[int, ...], float] = {}
    vocab = laws.both.target.vocab_size

    def add(text, chance):
        if len(text) >= new:
            out[text[:new]] = out.get(text[:new], 0.0) + chance
        elif chance > 0:
            round_from(text, text, 0, chance)

    def round_from(anchor, text, accepted, chance):
        """`accepted` drafts of the round behind `anchor` were kept, giving `text`."""
        if len(text) >= new:
            return add(text, chance)
        p = laws.p(text)
        if accepted == size:
            for token in range(vocab):
                add((*text, token), chance * float(p[token]))
            return
        q = laws.q(anchor, accepted, text[-1])
        rest = verify.behind(p[None, None].expand(1, 2, -1), q[None, None], torch.tensor([0]))[0]
        refused = 0.0
        for token in (q > 0).nonzero()[:, 0].tolist():
            keep = min(1.0, float(p[token] / q[token]))
            refused += float(q[token]) * (1 - keep)
            if keep > 0:
                round_from(anchor, (*text, token), accepted + 1, chance * float(q[token]) * keep)
        for token in range(vocab):
            add((*text, token), chance * refused * float(rest[token] / rest.sum()))

    for token in range(vocab):  # prefill gives the first token
        add((token,), float(laws.p(())[token]))
    return out


def target_law(laws, new):
    found = {(): 1.0}
    for _ in range(new):
        found = {(*text, v): chance * float(x) for text, chance in found.items() for v, x in enumerate(laws.p(text))}
    return found


@pytest.fixture(scope="module")
def small(tiny_target, tiny_drafter):
    """Four tokens, two drafts, two candidates, float64."""
    return Laws(make(tiny_target, tiny_drafter, 4, 2, 2, F64))


@torch.no_grad()
def test_enumerated_output_law_is_the_targets(small):
    exact, found = target_law(small, NEW), output_law(small, 2, NEW)
    assert all(int((small.q((v,), 0, v) > 0).sum()) == 2 for v in range(4))
    assert max(abs(found[text] - chance) for text, chance in exact.items()) < 1e-12
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)


@torch.no_grad()
def test_a_residual_from_p_on_the_candidates_alone_is_seen(small, monkeypatch):
    honest = verify.behind

    def narrow(p, q, accepted):
        return honest((p * (q > 0)) / (p * (q > 0)).sum(-1, keepdim=True), q, accepted)

    monkeypatch.setattr(verify, "behind", lambda p, q, accepted, *lengths: narrow(p, q.expand(1, 2, -1), accepted))
    exact, found = target_law(small, NEW), output_law(small, 2, NEW)
    assert max(abs(found.get(text, 0.0) - chance) for text, chance in exact.items()) > 1e-3


DRAWS = 2000


@pytest.fixture(scope="module")
def five(tiny_target, tiny_drafter):
    return make(tiny_target, tiny_drafter, 5, 3, 2)


def exact_law(target, law, new):
    """Chance of every answer of up to `new` tokens, from plain passes."""
    chances: dict[tuple[int, ...], float] = {}

    def go(text, chance):
        if len(text) == new or (text and text[-1] in target.end_ids):
            chances[text] = chance
            return
        ids = torch.tensor([[*PROMPT, *text]])
        step = target.forward(ids, target.cache(1, ids.shape[1]))
        p = distribution(target.logits(step.last[0, -1]), law.temperature, law.top_p, law.top_k).double()
        for token in range(target.vocab_size):
            if p[token] > 0:
                go((*text, token), chance * float(p[token] / p.sum()))

    go((), 1.0)
    return chances


def distance(chances, draws):
    """Chi-square over its quantile at one in a thousand (Wilson and Hilferty); rare cells are one."""
    cells, rare = [], [0.0, 0]
    assert set(draws) <= set(chances), "an answer of chance zero"
    for text, chance in chances.items():
        expected, seen = chance * len(draws), draws.count(text)
        if expected >= 5:
            cells.append((expected, seen))
        else:
            rare = [rare[0] + expected, rare[1] + seen]
    cells += [tuple(rare)] if rare[0] >= 5 else []
    freedom = len(cells) - 1
    assert freedom >= 5
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - expected) ** 2 / expected for expected, seen in cells) / quantile


def drawn(both, law):
    requests = [Request(PROMPT, 3, law, uniforms(11, str(number), uniform_count(3, 2))) for number in range(DRAWS)]
    decode(both, requests, 500)
    return requests


@pytest.mark.parametrize("law", [Law(1.0), Law(1.3, 0.95, 4)])
def test_chi_square_against_the_exact_law(five, law):
    requests = drawn(five, law)
    verdicts = [v for request in requests for v in request.rounds]
    refused = sum(v.accepted < v.proposed and len(v.committed) > v.accepted for v in verdicts) / len(verdicts)
    assert 0.05 < refused < 0.95, "both branches of the rule must be taken"
    assert distance(exact_law(five.target, law, 3), [tuple(request.output) for request in requests]) < 1


def test_a_residual_left_out_is_seen(five, monkeypatch):
    monkeypatch.setattr(verify, "behind", lambda p, q, accepted, *lengths: p[torch.arange(len(p)), accepted])
    requests = drawn(five, Law(1.0))
    assert distance(exact_law(five.target, Law(1.0), 3), [tuple(request.output) for request in requests]) > 2


def test_greedy_output_is_plain_decoding_and_rounds_are_those_predicted(tiny_target, tiny_drafter):
    both = taught(make(tiny_target, tiny_drafter, 12, 8, 4, F64, markov=30.0, rank=12))
    prompts = [[5, 6, 7 + number % 4, 2 + number] for number in range(8)]
    requests = [Request(prompt, 20) for prompt in prompts]
    decode(both, requests, 3)
    plain = [Plain(prompt, 20) for prompt in prompts]
    generate(both.target, plain, 3)
    assert [request.output for request in requests] == [request.output for request in plain]
    predictions = [predict(both, request.ids, request.output, Law(), chunk=5) for request in requests]
    for request, prediction in zip(requests, predictions, strict=True):
        assert (prediction.rounds if prediction else 0) == len(request.rounds)
    measured = metrics.accept_length_pooled([request.rounds for request in requests])
    assert measured > 1.3
    assert pooled(predictions) == pytest.approx(measured, abs=1e-12)


def test_sampled_rounds_are_near_those_predicted(tiny_target, tiny_drafter):
    both, law = taught(make(tiny_target, tiny_drafter, 12, 8, 3, F64, markov=30.0, rank=12)), Law(1.0)
    requests = [Request([5, 6, 7 + n % 4], 10, law, uniforms(3, str(n), uniform_count(10, 3))) for n in range(80)]
    decode(both, requests, 40)
    predictions = [predict(both, request.ids, request.output, law, chunk=5) for request in requests]
    assert pooled(predictions) == pytest.approx(metrics.accept_length_pooled([r.rounds for r in requests]), rel=0.05)
