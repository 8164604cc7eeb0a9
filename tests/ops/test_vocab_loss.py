"""Losses over the vocabulary: the chunked form equals the definition, values and every gradient; golden values.

Legend: R rows, D hidden size, r Markov rank, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch

from specgraft.ops.vocab_loss import chunked, naive

LOSSES = ("ce", "l1", "kl")


class Case:
    """Inputs of `slot_losses`, in float64, and one weight per row and loss."""

    def __init__(self, rows: int, size: int, rank: int, vocab: int, seed: int = 0, near: float | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, dtype=torch.float64)

        self.hidden, self.embedded = random(rows, size), random(rows, rank)
        self.target_hidden = random(rows, size)
        self.labels = torch.randint(0, vocab, (rows,), generator=generator)
        self.head, self.markov = random(vocab, size), random(vocab, rank)
        if near is not None:  # q differs from p by about `near`
            self.target_hidden = self.hidden + near * random(rows, size)
            self.markov = self.markov * 0
        self.weights = {name: torch.rand(rows, generator=generator, dtype=torch.float64) for name in LOSSES}

    def to(self, dtype: torch.dtype) -> Case:
        for name in ("hidden", "embedded", "target_hidden", "head", "markov"):
            setattr(self, name, getattr(self, name).to(dtype))
        self.weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return self

    def leaves(self) -> list[torch.Tensor]:
        return [tensor.detach().clone().requires_grad_() for tensor in (self.hidden, self.embedded, self.markov)]

    def by_definition(self) -> tuple[torch.Tensor, naive.SlotLosses, tuple[torch.Tensor, ...]]:
        hidden, embedded, markov = leaves = self.leaves()
        losses = naive.slot_losses(hidden, embedded, self.target_hidden, self.labels, self.head, markov)
        value = sum((self.weights[name] * getattr(losses, name)).sum() for name in LOSSES)
        assert isinstance(value, torch.Tensor)
        plain = naive.SlotLosses(*(loss.detach() for loss in losses))
        return value.detach(), plain, torch.autograd.grad(value, leaves)

    def by_chunks(
        self, chunk: int, compute: torch.dtype, **weights: torch.Tensor
    ) -> tuple[torch.Tensor, naive.SlotLosses, tuple[torch.Tensor, ...]]:
        hidden, embedded, markov = leaves = self.leaves()
        used = self.weights | weights
        value, losses = chunked.compound(
            hidden, embedded, self.target_hidden, self.labels, self.head, markov, used["ce"], used["l1"], chunk, compute, used["kl"]
        )
        return value.detach(), losses, torch.autograd.grad(value, leaves)


def assert_equal(found: tuple, expected: tuple, rtol: float, atol: float) -> None:  # type: ignore[type-arg]
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=atol)
    for name in naive.SlotLosses._fields:
        torch.testing.assert_close(getattr(found[1], name), getattr(expected[1], name), rtol=rtol, atol=atol)
    for name, a, b in zip(("hidden", "embedded", "markov"), found[2], expected[2], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
@pytest.mark.parametrize("rows", [1, 7, 13])
def test_chunked_equals_naive_in_value_and_every_gradient(rows: int, chunk: int) -> None:
    case = Case(rows, 11, 5, 37, seed=rows)
    assert_equal(case.by_chunks(chunk, torch.float64), case.by_definition(), 1e-11, 1e-12)


@pytest.mark.parametrize("near", [1e-2, 1e-5])
def test_chunked_equals_naive_where_the_drafter_is_nearly_the_target(near: float) -> None:
    case = Case(9, 11, 5, 37, near=near)
    found, expected = case.by_chunks(4, torch.float64), case.by_definition()
    assert 0 < float(expected[1].l1.max()) < 20 * near
    assert_equal(found, expected, 1e-9, 1e-12)
    assert (found[1].kl >= -1e-14).all() and (found[1].l1 >= 0).all() and (found[1].alpha <= 1).all()


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_alone_has_its_own_gradient(name: str) -> None:
    case = Case(6, 11, 5, 37, seed=3)
    for other in LOSSES:
        if other != name:
            case.weights[other] = torch.zeros_like(case.weights[other])
    assert_equal(case.by_chunks(4, torch.float64), case.by_definition(), 1e-11, 1e-12)


def laws(p: list[float], q: list[float]) -> Case:
    """A case whose p and q are these, in one row, label 0."""
    case = Case(1, len(p), 2, len(p))
    case.head = torch.eye(len(p), dtype=torch.float64)
    case.markov = torch.zeros(len(p), 2, dtype=torch.float64)
    case.target_hidden = torch.tensor([p], dtype=torch.float64).log()
    case.hidden = torch.tensor([q], dtype=torch.float64).log()
    case.labels = torch.tensor([0])
    return case


def test_golden_values_of_two_tokens() -> None:
    """algorithms 1.4: p = (.7, .3), q = (.5, .5)."""
    case = laws([0.7, 0.3], [0.5, 0.5])
    for losses in (case.by_definition()[1], case.by_chunks(1, torch.float64)[1], case.by_chunks(1, torch.float32)[1]):
        assert float(losses.alpha) == pytest.approx(0.8, abs=1e-6)
        assert float(losses.l1) == pytest.approx(0.4, abs=1e-6)
        assert float(losses.kl) == pytest.approx(0.0822829, abs=1e-6)
        assert float(losses.ce) == pytest.approx(math.log(2), abs=1e-6)
        assert float(losses.hit) == 1.0  # ties go to the first token


def test_l1_has_no_half_and_alpha_is_the_overlap() -> None:
    """p = (.7, .2, .1), q = (.5, .3, .2): L1 0.4, overlap 0.8."""
    losses = laws([0.7, 0.2, 0.1], [0.5, 0.3, 0.2]).by_chunks(1, torch.float64)[1]
    assert float(losses.l1) == pytest.approx(0.4, abs=1e-12)
    assert float(losses.alpha) == pytest.approx(0.8, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("ce", [-0.5, 0.5]), ("l1", [-0.5, 0.5]), ("kl", [-0.2, 0.2])],
)
def test_golden_logit_gradients(name: str, gradient: list[float]) -> None:
    """algorithms 3.2: ce q - onehot; l1 -2 q (b - <q,b>) with b = 1[q < p]; kl q - p. Here the head is the identity."""
    case = laws([0.7, 0.3], [0.5, 0.5])
    case.weights = {other: torch.tensor([float(other == name)], dtype=torch.float64) for other in LOSSES}
    for _, _, grads in (case.by_definition(), case.by_chunks(1, torch.float64)):
        assert grads[0][0].tolist() == pytest.approx(gradient, abs=1e-12)


def test_target_states_and_head_are_constants() -> None:
    case = Case(5, 11, 5, 37)
    hidden, embedded, markov = case.leaves()
    head, target = case.head.clone().requires_grad_(), case.target_hidden.clone().requires_grad_()
    value, losses = chunked.compound(
        hidden, embedded, target, case.labels, head, markov, case.weights["ce"], case.weights["l1"], 2, torch.float64
    )
    value.backward()
    assert head.grad is None and target.grad is None and hidden.grad is not None
    assert not any(getattr(losses, name).requires_grad for name in losses._fields)


def test_the_gradient_scales_with_what_comes_behind() -> None:
    case = Case(5, 11, 5, 37)
    hidden, embedded, markov = case.leaves()
    value, _ = chunked.compound(
        hidden, embedded, case.target_hidden, case.labels, case.head, markov, case.weights["ce"], case.weights["l1"], 2, torch.float64
    )
    (value / 8).backward()
    expected = case.by_chunks(2, torch.float64, kl=torch.zeros(5, dtype=torch.float64))
    for leaf, grad in zip((hidden, embedded, markov), expected[2], strict=True):
        torch.testing.assert_close(leaf.grad, grad / 8, rtol=1e-12, atol=1e-14)


def test_values_are_the_same_without_a_graph() -> None:
    case = Case(7, 11, 5, 37)
    with torch.no_grad():
        value, losses = chunked.compound(
            case.hidden, case.embedded, case.target_hidden, case.labels, case.head, case.markov,
            case.weights["ce"], case.weights["l1"], 3, torch.float64, case.weights["kl"],
        )  # fmt: skip
    expected = case.by_chunks(3, torch.float64)
    assert torch.equal(value, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(losses, expected[1], strict=True))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_float32_is_within_1e_5_of_float64_at_a_vocabulary_of_49152() -> None:
    case = Case(3, 48, 8, 49_152, seed=2)
    case.head, case.markov = case.head * 0.3, case.markov * 0.3
    exact = case.by_definition()
    found = case.to(torch.float32).by_chunks(2, torch.float32)
    assert float(found[0]) == pytest.approx(float(exact[0]), rel=1e-5)
    for name in ("ce", "l1", "alpha", "kl"):
        assert getattr(found[1], name).tolist() == pytest.approx(getattr(exact[1], name).tolist(), rel=1e-5)
    for a, b in zip(found[2], exact[2], strict=True):
        assert relative(a, b) < 1e-5


def test_float32_gradients_hold_where_half_precision_losses_cancel() -> None:
    """8 rows, V = 32,000, q = p + 0.1 x normal in logits, both rounded to bfloat16: bfloat16 losses are 9 to 24 % off."""
    rows, vocab = 8, 32_000
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(vocab, rows, generator=generator)).bfloat16().double()
    q = (p + 0.1 * torch.randn(vocab, rows, generator=generator).double()).bfloat16().double()
    case = Case(rows, rows, rows, vocab)
    case.hidden = case.target_hidden = case.embedded = torch.eye(rows, dtype=torch.float64)
    case.head, case.markov = p, q - p
    exact = case.by_definition()
    found = case.to(torch.float32).by_chunks(3, torch.float32)
    assert relative(found[0], exact[0]) < 1e-5
    assert relative(found[2][2], exact[2][2]) < 1e-5  # gradient of the logits themselves


def test_bfloat16_products_cost_less_than_two_percent_of_value_and_five_of_gradient() -> None:
    """What `train.compute = "bfloat16"` costs on a CPU, where the products come back rounded: fit for training only."""
    case = Case(16, 64, 8, 2_048, seed=4)
    case.head, case.markov = case.head * 0.3, case.markov * 0.3
    exact = case.by_definition()
    found = case.to(torch.float32).by_chunks(5, torch.bfloat16)
    assert found[0].dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in found[2])
    assert relative(found[0], exact[0]) < 0.02
    for name in ("ce", "l1", "alpha", "kl"):
        assert relative(getattr(found[1], name), getattr(exact[1], name)) < 0.02
    for a, b in zip(found[2], exact[2], strict=True):
        assert relative(a, b) < 0.05
