"""The Draft-OPD loss against its definition with full-vocabulary tensors, in value and every gradient.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rounds_by_hand import (
    ENDS,
    KINDS,
    VOCAB,
    Round,
    batch_of_texts,
    greedy,
    loss_by_hand,
    make,
    rounds_by_hand,
    some_prompts,
)

from by_hand import F64
from specgraft.config import DistillSection
from specgraft.decode.pair import Pair, pair
from specgraft.distill import draft_opd as module
from specgraft.distill import ranks
from specgraft.distill.draft_opd import draft_opd, single_token
from specgraft.ops.vocab_loss import fused

OPTIONS = DistillSection(preset="draft_opd", chunk_rows=5, fused="off")
TOKEN = OPTIONS.model_copy(update={"rollout_estimator": "token"})


def gradients(both: Pair, loss: torch.Tensor, keep: bool = False) -> dict[str, torch.Tensor]:
    names, parameters = zip(*both.drafter.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], idle: tuple[str, ...] = ()) -> None:
    for name, value in expected.items():
        largest = float(value.abs().max())
        assert (largest > 0) is not name.startswith(idle), name
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-8 * max(largest, 1e-3), msg=lambda text, name=name: f"{name}: {text}")


def rounds_of(both: Pair) -> list[Round]:
    prompts, counts = some_prompts()
    answers = greedy(both, prompts, counts)
    return [each for ids, answer in zip(prompts, answers, strict=True) for each in rounds_by_hand(both, ids, answer)]


def compare(both: Pair, rounds: list[Round], options: DistillSection, idle: tuple[str, ...] = (), **how: Any) -> None:
    outcome = draft_opd(both, batch_of_texts(*some_prompts()), options, F64)
    loss, parts = loss_by_hand(rounds, token=options.rollout_estimator == "token", **how)
    assert float(outcome.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-8)
    for name, value in outcome.numerators.items():
        assert float(value) == pytest.approx(parts[name], rel=1e-8), name
    assert float(outcome.denominators["response"]) == pytest.approx(parts["of response"], rel=1e-12)
    assert float(outcome.denominators["rejected"]) == pytest.approx(parts["of response"], rel=1e-12)
    assert (both.drafter.confidence_head is not None and "confidence" in options.weights("dspark")) is ("confidence" in outcome.numerators)
    same(gradients(both, outcome.loss), gradients(both, loss, keep=True), idle)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_every_gradient_are_those_of_the_definition(tiny_target, tiny_drafter, name) -> None:
    both = make(tiny_target, tiny_drafter, name)
    rounds = rounds_of(both)
    for options in (OPTIONS, TOKEN):
        compare(both, rounds, options, ("candidate_selector",) if name == "dflash2" else ())


def test_weights_of_the_streams_and_of_the_confidence(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "vanilla")
    rounds = rounds_of(both)
    for base in (OPTIONS, TOKEN):
        for weight in (0.0, 0.3):
            options = base.model_copy(update={"rollout_rejected": weight, "rollout_decay": 0.5, "confidence": 0.7})
            compare(both, rounds, options, weight=weight, decay=0.5, confidence=0.7)
    compare(both, rounds, OPTIONS.model_copy(update={"confidence": 0.0}), ("confidence_head",), confidence=0.0)


def test_packed_rows_are_the_same_step(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "rnn")
    apart, together = (draft_opd(both, batch_of_texts(*some_prompts(), packed), OPTIONS, F64) for packed in (False, True))
    assert float(apart.loss.detach()) == pytest.approx(float(together.loss.detach()), rel=1e-12)
    same(gradients(both, together.loss), gradients(both, apart.loss))


def test_fused_passes_are_the_same_step(tiny_target, tiny_drafter, monkeypatch) -> None:
    """What is compiled is tested with the ops; here that both estimators can run on it, uncompiled."""
    monkeypatch.setattr(fused, "_compiled", lambda kernel: kernel)
    fused._law_kernel.cache_clear()
    fused._draft_kernel.cache_clear()
    both = make(tiny_target, tiny_drafter, "vanilla")
    try:
        rounds = rounds_of(both)
        for options in (OPTIONS, TOKEN):
            compare(both, rounds, options.model_copy(update={"fused": "on"}))
    finally:
        fused._law_kernel.cache_clear()
        fused._draft_kernel.cache_clear()


# --- ranks


def test_two_ranks_step_as_one_process(tiny_target, tiny_drafter, monkeypatch) -> None:
    """One denominator over all ranks, whatever each has; the third share has no round at all (its texts are one token)."""
    both = make(tiny_target, tiny_drafter, "vanilla")
    prompts, counts = some_prompts()
    shares = [slice(0, 1), slice(1, 3), slice(3, 4)]
    whole = draft_opd(both, batch_of_texts(prompts, counts), OPTIONS, F64)
    told: list[torch.Tensor] = []
    monkeypatch.setattr(ranks, "total", lambda values: told.append(values) or values)
    for share in shares:
        draft_opd(both, batch_of_texts(prompts[share], counts[share]), OPTIONS, F64)
    monkeypatch.setattr(ranks, "total", lambda values: torch.stack(told).sum(0))
    monkeypatch.setattr(module, "world", lambda: 3)
    outcomes = [draft_opd(both, batch_of_texts(prompts[share], counts[share]), OPTIONS, F64) for share in shares]
    assert [int(outcome.sums["count"].sum()) > 0 for outcome in outcomes] == [True, True, False]
    assert sum(float(outcome.loss.detach()) for outcome in outcomes) / 3 == pytest.approx(float(whole.loss.detach()), rel=1e-12)
    for name, value in whole.denominators.items():
        assert all(float(outcome.denominators[name]) == pytest.approx(float(value)) for outcome in outcomes)
        assert float(sum(outcome.numerators[name] for outcome in outcomes)) == pytest.approx(float(whole.numerators[name]))
    for parameter in both.drafter.parameters():
        parameter.grad = None
    for outcome in outcomes:
        (outcome.loss / 3).backward()
    same({name: p.grad for name, p in both.drafter.named_parameters()}, gradients(both, whole.loss))


def test_a_batch_without_rounds_is_no_step(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "dflash")
    outcome = draft_opd(both, batch_of_texts(*some_prompts()), OPTIONS, F64, limit=1)
    outcome.loss.backward()
    assert float(outcome.loss.detach()) == 0 and float(outcome.sums["count"].sum()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in both.drafter.parameters())


# --- the single-token estimators


def laws(seed: int, vocab: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and logits z of q, [V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator, dtype=F64).log_softmax(-1), torch.randn(vocab, generator=generator, dtype=F64)


@pytest.mark.parametrize("seed", range(3))
def test_k3_has_the_value_of_one_divergence_and_the_slope_of_the_other(seed: int) -> None:
    """The trap of algorithms.md 3.9: over all drafts d ~ q, the value is KL(q||p) and the slope that of KL(p||q)."""
    log_p, z = laws(seed)
    z.requires_grad_()
    log_q = z.log_softmax(-1)
    values, slopes = single_token(log_q.detach(), log_p, torch.zeros(6, dtype=torch.bool))
    q = log_q.exp().detach()
    forward, reverse = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    assert float((q * values).sum()) == pytest.approx(float(reverse.detach()), rel=1e-12)
    (mean,) = torch.autograd.grad(((q * slopes) * log_q).sum(), z, retain_graph=True)
    of_forward, of_reverse = (torch.autograd.grad(kl, z, retain_graph=True)[0] for kl in (forward, reverse))
    torch.testing.assert_close(mean, of_forward, rtol=1e-12, atol=1e-14)
    assert float((mean - of_reverse).abs().max()) > 0.01


def test_bernoulli_term_by_hand() -> None:
    values, slopes = single_token(torch.tensor([0.5]).log(), torch.tensor([0.8]).log(), torch.tensor([True]))
    assert float(values) == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-6)
    assert float(slopes) == pytest.approx((0.5 - 0.8) / (1 - 0.5), rel=1e-6)  # (s - t) / (1 - s) in log s


@pytest.mark.parametrize("kind", [torch.float32, F64])
def test_floors_and_clamps_stop_value_and_slope(kind: torch.dtype) -> None:
    far = torch.tensor([-30.0, -30.0, 0.0, 0.0, -1.0, -1.0], dtype=kind)  # log q
    other = torch.tensor([-0.1, -0.1, -1.0, -40.0, float("-inf"), float("-inf")], dtype=kind)  # log p
    response = torch.tensor([True, False, True, False, True, False])
    values, slopes = single_token(far, other, response)
    t = torch.tensor(-0.1, dtype=kind).exp()
    floor = t * (-0.1 + 10) + (1 - t) * (torch.log1p(-t) - torch.log1p(-torch.tensor(-10.0, dtype=kind).exp()))
    assert float(values[0]) == pytest.approx(float(floor), rel=1e-5) and float(slopes[0]) == 0
    assert float(values[1]) == 10 and float(slopes[1]) == 0  # k3 of a draft that the target wants and the drafter does not
    assert float(values[3]) == 10 and float(slopes[3]) == 0
    assert torch.isfinite(values).all() and torch.isfinite(slopes).all() and float(values.max()) <= 10


# --- what is told, what is refused


def test_what_a_step_tells(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "vanilla")
    prompts, counts = some_prompts()
    outcome = draft_opd(both, batch_of_texts(prompts, counts), OPTIONS, F64)
    rounds = rounds_of(both)
    slots = [[slot for each in rounds for slot in each.slots if slot.j == j] for j in range(1, 5)]
    assert outcome.sums["count"].tolist() == [len(each) for each in slots]
    assert outcome.sums["accepted"].tolist() == [sum(each.accepted >= j for each in rounds) for j in range(1, 5)]
    overlap = [sum(float(torch.minimum(slot.log_p.exp(), slot.log_q.detach().exp()).sum()) for slot in each) for each in slots]
    assert outcome.sums["alpha"].tolist() == pytest.approx(overlap, rel=1e-6)
    assert set(outcome.sums) == {"kl", "rkl", "alpha", "hit", "accepted", "count", "bce"}
    token = draft_opd(both, batch_of_texts(prompts, counts), TOKEN, F64)
    assert token.sums["count"].tolist() == outcome.sums["count"].tolist() and token.sums["bce"].tolist() == pytest.approx(outcome.sums["bce"].tolist())
    assert set(outcome.seconds) == {"sample", "score", "learn"} and min(outcome.seconds.values()) > 0


@pytest.mark.parametrize(("dtype", "compute"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_half_precision_is_near(tiny_target, tiny_drafter, dtype, compute) -> None:
    """Of the products, and of the target alone."""
    both = make(tiny_target, tiny_drafter, "vanilla")
    exact = draft_opd(both, batch_of_texts(*some_prompts()), OPTIONS, F64)
    single = pair(tiny_target(vocab=VOCAB, dtype=dtype, end=ENDS, markov=8.0, spread=0.2, seed=2), both.drafter.float())
    half = draft_opd(single, batch_of_texts(*some_prompts()), OPTIONS, compute)
    half.loss.backward()
    assert float(half.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.1)


@pytest.mark.parametrize("kind", ["vanilla", "dflash", "dflash2"])
def test_a_step_whose_answers_were_all_cut_away_moves_nothing(tiny_target, tiny_drafter, kind) -> None:
    both = make(tiny_target, tiny_drafter, kind)
    batch = batch_of_texts(*some_prompts())
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask), anchors=replace(batch.anchors, mask=torch.zeros_like(batch.anchors.mask)))
    outcome = draft_opd(both, empty, OPTIONS, F64)
    outcome.loss.backward()
    assert float(outcome.sums["count"].sum()) == 0 == float(outcome.loss.detach())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in both.drafter.parameters())


def test_other_losses_are_refused(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "dflash")
    with pytest.raises(ValueError, match="ce is none of them"):
        draft_opd(both, batch_of_texts(*some_prompts()), DistillSection(slots="rollouts"))
