"""The losses of a selector's law: the chunked form equals the definition, and the definition the written formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specgraft.ops.selector_loss import chunked, naive

VOCAB, HIDDEN, RANK, TOP, SOURCES = 37, 11, 4, 5, 9


def case(count: int, inject: bool):
    """Random slots whose label is now and then a candidate, with head and codebook."""
    generator = torch.Generator().manual_seed(count)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    hidden, gate, head, successor = random(count, HIDDEN), random(count, RANK), random(VOCAB, HIDDEN), random(VOCAB, RANK)
    ids = (hidden @ head.T).topk(TOP).indices
    labels = torch.randint(0, VOCAB, (count,), generator=generator)
    labels[::2] = ids[::2, 3]
    source = torch.randint(0, SOURCES, (count,), generator=generator)
    p, best = naive.target_at(2 * random(SOURCES, HIDDEN), source, ids, head)
    rows = naive.Candidates(hidden.requires_grad_(), gate.requires_grad_(), ids, labels, inject, p, best)
    weights = {name: random(count).abs() for name in naive.LEARNT}
    return rows, head, successor.requires_grad_(), weights


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 70])
def test_chunked_equals_naive_in_value_and_every_gradient(count: int, inject: bool, chunk: int) -> None:
    rows, head, successor, weights = case(count, inject)
    exact = naive.selector_losses(rows, head, successor)
    value = torch.stack([(weights[name] * getattr(exact, name)).sum() for name in weights]).sum()
    found, losses = chunked.weighted_selector_losses(rows, head, successor, weights, chunk)
    torch.testing.assert_close(found, value)
    for a, b in zip(losses, exact, strict=True):
        torch.testing.assert_close(a, b.detach())
    leaves = [rows.hidden, rows.gate, successor]
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(value, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("inject", [False, True])
def test_the_definition_is_the_written_formula_slot_by_slot(inject: bool) -> None:
    rows, head, successor, _ = case(40, inject)
    losses = naive.selector_losses(rows, head, successor)
    rows = dataclasses.replace(rows, hidden=rows.hidden.detach(), gate=rows.gate.detach())
    losses, successor = naive.SelectorLosses._make(x.detach() for x in losses), successor.detach()
    assert 0 < int(rows.found.sum()) < 40
    for slot in range(40):
        every = head @ rows.hidden[slot] + successor @ rows.gate[slot]  # Z of the whole vocabulary
        candidates, label = rows.ids[slot].tolist(), int(rows.label[slot])
        law = {v: float(x) for v, x in zip(candidates, every[candidates].softmax(-1), strict=True)}
        alpha = sum(min(float(rows.p[slot, place]), law[v]) for place, v in enumerate(candidates))
        taught = candidates if label in candidates or not inject else [*candidates[:-1], label]
        ce = -float(every[taught].log_softmax(-1)[taught.index(label)]) if label in taught else 0.0
        chosen = max(law, key=lambda v: law[v])
        assert float(losses.selector[slot]) == pytest.approx(ce, abs=1e-12)
        assert float(losses.alpha[slot]) == pytest.approx(alpha, abs=1e-12)
        assert float(losses.tv[slot]) == pytest.approx(1 - alpha, abs=1e-12) == pytest.approx(float(losses.l1[slot]) / 2)
        assert float(losses.picked[slot]) == (chosen == label)
        assert float(losses.hit[slot]) == (chosen == int(rows.best[slot]))
        assert alpha - 1e-12 <= float(losses.mass[slot]) < 1  # p is not renormalised


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_the_targets_law_at_the_candidates(chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(SOURCES, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    source = torch.randint(0, SOURCES - 1, (30,), generator=generator)  # one source has no slot
    ids = torch.randint(0, VOCAB, (30, TOP), generator=generator)
    exact, found = naive.target_at(states, source, ids, head), chunked.target_at(states, source, ids, head, chunk)
    torch.testing.assert_close(found[0], exact[0])
    assert torch.equal(found[1], exact[1])
    half, _ = chunked.target_at(states.float(), source, ids, head.float(), chunk, torch.bfloat16)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact[0].float(), rtol=0.1, atol=0.01)


def test_what_cannot_be_learnt_from_is_refused() -> None:
    rows, head, successor, weights = case(3, False)
    with pytest.raises(ValueError, match="have no gradient; weights may name selector, tv, l1, lk_alpha"):
        chunked.weighted_selector_losses(rows, head, successor, {"mass": weights["tv"]})
    bare = naive.Candidates(rows.hidden, rows.gate, rows.ids, rows.label, False)
    with pytest.raises(ValueError, match="need the target's law"):
        chunked.weighted_selector_losses(bare, head, successor, {"tv": weights["tv"]})
    _, losses = chunked.weighted_selector_losses(bare, head, successor, {"selector": weights["tv"]})
    assert losses.alpha is None
