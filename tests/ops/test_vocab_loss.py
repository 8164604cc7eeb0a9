"""Losses over the vocabulary: the chunked form equals the definition, values and every gradient; golden values.

Legend: R rows (slots), U sources, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specgraft.ops.vocab_loss import grouping, naive
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.fused import can_fuse

DOUBLE = torch.float64
Found = tuple[torch.Tensor, naive.SlotLosses, dict[str, torch.Tensor]]


@dataclass
class Case:
    rows: naive.Rows
    head: torch.Tensor
    markov: torch.Tensor | None
    weights: dict[str, torch.Tensor]

    def to(self, dtype: torch.dtype) -> Case:
        """Inputs in another dtype; their values, rounded, stay the reference's."""

        def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

        rows = naive.Rows(**{name: cast(value) for name, value in vars(self.rows).items()})
        weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return Case(rows, self.head.to(dtype), cast(self.markov), weights)

    def gradients(self, work: Callable[[Case], tuple[torch.Tensor, naive.SlotLosses]]) -> Found:
        hidden, latent, markov = self.rows.hidden, self.rows.latent, self.markov
        leaves = {"hidden": hidden, "latent": latent, "markov": None if latent is None else markov}
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
        row_leaves = {name: leaf for name, leaf in leaves.items() if name != "markov"}
        case = replace(self, rows=replace(self.rows, **row_leaves), markov=leaves.get("markov", markov))
        value, losses = work(case)
        return value.detach(), losses, dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))

    def exact(self, softcap: float = 0.0) -> Found:
        def work(case: Case) -> tuple[torch.Tensor, naive.SlotLosses]:
            losses = naive.slot_losses(case.rows, case.head, case.markov, softcap=softcap)
            return torch.stack([(case.weights[name] * getattr(losses, name)).sum() for name in case.weights]).sum(), losses

        return self.to(DOUBLE).gradients(work)

    def chunked(self, **options: object) -> Found:
        return self.gradients(lambda case: weighted_losses(case.rows, case.head, case.markov, case.weights, **options)[:2])  # type: ignore[arg-type]


def build(
    count: int, vocab: int = 37, sources: int = 9, latents: str = "shared", size: int = 11, rank: int = 5,
    scale: float = 0.5, names: tuple[str, ...] = naive.POINTWISE,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(count + vocab)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=DOUBLE)

    source = torch.randint(0, sources, (count,), generator=generator)
    other = torch.randint(0, sources, (count,), generator=generator)
    latent_row = {"shared": source, "equal": source.clone(), "own": other, "order": None, "none": None}[latents]
    latent = None if latents == "none" else random(count if latents == "order" else sources, rank)
    labels = torch.randint(0, vocab, (count,), generator=generator)
    rows = naive.Rows(random(count, size), labels, random(sources, size), source, latent, latent_row)
    weights = {name: random(count).abs() for name in names}
    return Case(rows, random(vocab, size) * scale, random(vocab, rank) * scale, weights)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp_min(1e-30))


def assert_equal(found: Found, exact: Found, bound: float) -> None:
    """Norm-wise relative; alpha, a probability, absolute."""
    assert relative(found[0], exact[0]) < bound
    for name in naive.SlotLosses._fields:
        mine = getattr(found[1], name)
        if name == "alpha" and mine is not None:
            assert mine.double().tolist() == pytest.approx(exact[1].alpha.tolist(), abs=bound, rel=0)  # type: ignore[union-attr]
        elif mine is not None:
            assert relative(mine, getattr(exact[1], name)) < bound, name
    assert found[2].keys() == exact[2].keys()
    for name, grad in exact[2].items():
        assert relative(found[2][name], grad) < bound, f"gradient of {name}"


@pytest.mark.parametrize("latents", ["shared", "equal", "own", "order", "none"])
@pytest.mark.parametrize(("count", "sources", "chunk"), [(1, 1, 64), (7, 1, 3), (7, 9, 7), (70, 9, 16), (70, 300, 64), (13, 4, 1)])
def test_value_and_every_gradient_are_those_of_the_definition(latents: str, count: int, sources: int, chunk: int) -> None:
    case = build(count, sources=sources, latents=latents)
    assert_equal(case.chunked(chunk=chunk, want=("hit", "target_ce")), case.exact(), 1e-12)
    assert_equal(case.to(torch.float32).chunked(chunk=chunk, want=("hit", "target_ce")), case.to(torch.float32).exact(), 1e-5)


@pytest.mark.parametrize("vocab", [37, 1001])
@pytest.mark.parametrize("name", naive.POINTWISE)
def test_each_loss_alone(name: str, vocab: int) -> None:
    case = build(23, vocab, names=(name,))
    assert_equal(case.chunked(chunk=8), case.exact(), 1e-12)
    assert_equal(case.to(torch.float32).chunked(chunk=8), case.to(torch.float32).exact(), 1e-5)


@pytest.mark.parametrize("names", [("ce", "l1"), ("kl", "rkl"), ("jsd", "tv"), ("lk_hybrid", "ce")])
def test_mixtures_with_a_softcap(names: tuple[str, ...]) -> None:
    case = build(23, names=names)
    assert_equal(case.chunked(chunk=8, softcap=2.0), case.exact(2.0), 1e-12)


@pytest.mark.parametrize("name", naive.POINTWISE)
def test_gradcheck_of_the_definition(name: str) -> None:
    case = build(3, 7, sources=2)
    hidden = case.rows.hidden.clone().requires_grad_()

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        # eta 0 for lk_hybrid: share is a constant there, which finite differences would see through
        return getattr(naive.slot_losses(replace(case.rows, hidden=hidden), case.head, case.markov, eta=0.0), name)

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_a_slot_in_every_chunk_once() -> None:
    key = torch.tensor([4, 4, 4, 4, 4, 4, 4, 2, 2, 9, 0, 9, 9])
    pieces = list(grouping.chunks(key, 4))
    assert sorted(torch.cat([piece.rows for piece in pieces]).tolist()) == list(range(len(key)))
    for piece in pieces:
        assert len(piece.rows) <= 4 and sum(piece.widths) == len(piece.rows)
        for here, above in piece.blocks(2):
            assert torch.equal(key[piece.rows[here]], piece.sources[above])
    assert list(grouping.chunks(key[:0], 4)) == []


@pytest.mark.parametrize("near", [1e-2, 1e-4])
def test_where_the_drafter_is_nearly_the_target(near: float) -> None:
    case = build(16, 1001, sources=16, latents="none", names=("ce", "kl", "l1", "jsd"))
    generator = torch.Generator().manual_seed(0)
    assert case.rows.target_hidden is not None and case.rows.source is not None
    noise = torch.randn(16, 11, generator=generator, dtype=DOUBLE)
    case.rows = replace(case.rows, hidden=case.rows.target_hidden[case.rows.source] + near * noise)
    exact = case.exact()
    assert 0 < float(exact[1].l1.detach().max()) < 20 * near  # type: ignore[union-attr]
    assert_equal(case.chunked(chunk=5), exact, 1e-6)
    # float32 logits are good to 1e-6, so a gap of `near` between them to 1e-6 / near
    single = case.to(torch.float32).chunked(chunk=5)
    assert relative(single[2]["hidden"], case.to(torch.float32).exact()[2]["hidden"]) < 3e-6 / near
    assert (single[1].alpha <= 1).all() and (single[1].l1 >= 0).all()  # type: ignore[operator,union-attr]


def test_a_vocabulary_of_49152() -> None:
    case = build(4, 49_152, sources=2, size=48, scale=0.3).to(torch.float32)
    assert_equal(case.chunked(chunk=3), case.exact(), 1e-5)


def laws(p: list[float], q: list[float], name: str | None = None) -> Case:
    """One row with these laws, label 0; the head is the identity."""
    count = len(p)
    rows = naive.Rows(torch.tensor([q], dtype=DOUBLE).log(), torch.tensor([0]), torch.tensor([p], dtype=DOUBLE).log())
    return Case(rows, torch.eye(count, dtype=DOUBLE), None, {} if name is None else {name: torch.ones(1, dtype=DOUBLE)})


def values(case: Case) -> list[naive.SlotLosses]:
    names = [*naive.POINTWISE, "alpha", "hit", "target_ce"]
    return [
        naive.slot_losses(case.rows, case.head, None),
        weighted_losses(case.rows, case.head, None, {}, want=names)[1],
        weighted_losses(case.to(torch.float32).rows, case.head.float(), None, {}, want=names)[1],
    ]


def test_golden_values_of_two_tokens() -> None:
    """algorithms.md 1.4 and 3.13."""
    golden = {"ce": math.log(2), "alpha": 0.8, "tv": 0.2, "l1": 0.4, "kl": 0.0822829, "rkl": 0.0871767, "jsd": 0.0210059}
    golden |= {"lk_alpha": 0.2231436, "lk_hybrid": 0.1893209, "hit": 1.0, "target_ce": -math.log(0.7)}
    for losses in values(laws([0.7, 0.3], [0.5, 0.5])):
        for name, expected in golden.items():
            assert float(getattr(losses, name)) == pytest.approx(expected, abs=1e-6), name


def test_l1_has_no_half_and_alpha_is_the_overlap() -> None:
    """N4."""
    for losses in values(laws([0.7, 0.2, 0.1], [0.5, 0.3, 0.2])):
        assert [float(x) for x in (losses.l1, losses.tv, losses.alpha)] == pytest.approx([0.4, 0.2, 0.8], abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ce", [-0.5, 0.5]), ("l1", [-0.5, 0.5]), ("tv", [-0.25, 0.25]), ("kl", [-0.2, 0.2]), ("lk_alpha", [-0.3125, 0.3125])],
)
def test_golden_logit_gradients(name: str, expected: list[float]) -> None:
    """algorithms.md 3.2."""
    case = laws([0.7, 0.3], [0.5, 0.5], name)
    for found in (case.exact(), case.chunked()):
        assert found[2]["hidden"][0].tolist() == pytest.approx(expected, abs=1e-12)


def test_one_sharp_target_and_a_uniform_draft() -> None:
    """algorithms.md 3.11: where laws hardly overlap tv has next to no gradient, kl and lk_alpha do."""
    vocab = 1001
    sizes = {}
    for name in naive.POINTWISE:
        case = build(1, vocab, sources=1, latents="none", size=1, names=(name,))
        head = torch.zeros(vocab, 1, dtype=DOUBLE)
        head[3] = 80.0
        one, zero = torch.ones(1, 1, dtype=DOUBLE), torch.zeros(1, 1, dtype=DOUBLE)
        case = replace(case, head=head, rows=replace(case.rows, hidden=zero, target_hidden=one)).to(torch.float32)
        found, exact = case.chunked(), case.exact()
        assert_equal(found, exact, 1e-5)
        sizes[name] = float(found[2]["hidden"].norm())
        assert math.isfinite(sizes[name])
    assert sizes["tv"] < sizes["kl"] / 500 and sizes["lk_alpha"] > sizes["kl"] / 2


def test_lk_alpha_is_constant_below_its_floor() -> None:
    case = laws([1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9], "lk_alpha")
    for found in (case.exact(), case.chunked()):
        assert float(found[0]) == pytest.approx(-math.log(1e-6))
        assert float(found[2]["hidden"].norm()) == 0


def test_float32_holds_where_half_precision_losses_cancel() -> None:
    """N3: 8 rows, V = 32,000, q = p + 0.1 x normal in logits, both rounded to bfloat16."""
    count, vocab = 8, 32_000
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(vocab, count, generator=generator)).bfloat16()
    q = (p.double() + 0.1 * torch.randn(vocab, count, generator=generator).double()).bfloat16()
    eye = torch.eye(count)
    rows = naive.Rows(eye, torch.zeros(count, dtype=torch.long), eye, latent=eye)
    markov = q.float() - p.float()  # its gradient is that of the logits
    for name in ("kl", "tv"):
        case = Case(rows, p.float(), markov, {name: torch.ones(count)})
        found, exact = case.chunked(chunk=3), case.exact()
        assert relative(found[0], exact[0]) < 1e-4  # kl is 5e-3 a row here; a float32 log-sum-exp is good to 2e-7
        assert relative(found[2]["markov"], exact[2]["markov"]) < 1e-5


def test_bfloat16_products_cost_two_percent_of_value_and_five_of_gradient() -> None:
    case = build(40, 2_048, latents="own", size=64, scale=0.2, names=("ce", "l1", "kl"))
    found, exact = case.to(torch.float32).chunked(chunk=16, compute=torch.bfloat16), case.exact()
    assert found[0].dtype == torch.float32 and all(grad.dtype == torch.float32 for grad in found[2].values())
    assert relative(found[0], exact[0]) < 0.02
    for name, grad in exact[2].items():
        assert relative(found[2][name], grad) < 0.05, name


def test_only_what_is_asked_for_is_there() -> None:
    case = build(9)
    value, losses, top = weighted_losses(case.rows, case.head, case.markov, {}, want=("alpha",), top_k=4)
    assert float(value) == 0 and not value.requires_grad and losses.kl is None and losses.hit is None and losses.tv is not None
    assert case.rows.latent is not None and case.rows.latent_row is not None and case.markov is not None
    logits = case.rows.hidden @ case.head.T + case.rows.latent[case.rows.latent_row] @ case.markov.T
    assert top is not None and torch.equal(top, logits.topk(4).indices)
    alone = replace(case.rows, target_hidden=None, source=None)
    _, ce, _ = weighted_losses(alone, case.head, case.markov, {}, top_k=0)
    torch.testing.assert_close(ce.ce, losses.ce)
    with pytest.raises(ValueError, match="need target_hidden"):
        weighted_losses(alone, case.head, case.markov, {"kl": case.weights["kl"]})
    with pytest.raises(ValueError, match="no gradient"):
        weighted_losses(case.rows, case.head, case.markov, {"alpha": case.weights["kl"]})
    with pytest.raises(ValueError, match="unknown"):
        weighted_losses(case.rows, case.head, case.markov, {}, want=("l2",))


def test_without_grad_values_are_the_same() -> None:
    case = build(9)
    with torch.no_grad():
        value, losses, _ = weighted_losses(case.rows, case.head, case.markov, case.weights, chunk=4)
    expected = case.chunked(chunk=4)
    assert torch.equal(value, expected[0])
    for a, b in zip(losses, expected[1], strict=True):
        assert a is b is None or torch.equal(a, b)


def test_no_rows_and_weights_of_zero() -> None:
    case = build(9)
    none = replace(case.rows, hidden=case.rows.hidden[:0].requires_grad_(), labels=case.rows.labels[:0], source=case.rows.labels[:0],
                   latent_row=case.rows.labels[:0])  # fmt: skip
    value, losses, _ = weighted_losses(none, case.head, case.markov, {"ce": torch.zeros(0)})
    value.backward()
    assert float(value.detach()) == 0 and losses.ce.shape == (0,) and none.hidden.grad is not None
    case.weights = {name: torch.zeros_like(weight) for name, weight in case.weights.items()}
    assert all(float(grad.norm()) == 0 for grad in case.chunked(chunk=4)[2].values())


def test_the_gradient_scales_once_and_frozen_tensors_have_none() -> None:
    case = build(9)
    hidden = case.rows.hidden.clone().requires_grad_()
    head = case.head.clone().requires_grad_()
    assert case.rows.target_hidden is not None
    target = case.rows.target_hidden.clone().requires_grad_()
    rows = replace(case.rows, hidden=hidden, target_hidden=target)
    value, losses, _ = weighted_losses(rows, head, case.markov, case.weights, chunk=4)
    (value / 8).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, case.exact()[2]["hidden"] / 8, rtol=1e-10, atol=1e-12)
    assert head.grad is None and target.grad is None
    assert not any(loss.requires_grad for loss in losses if loss is not None)
    with pytest.raises(RuntimeError, match="once"):
        value.backward()


class Largest(TorchDispatchMode):
    """The most elements any operation gave out, and whether the target's logits were needed."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_rows_by_the_vocabulary(compute: torch.dtype) -> None:
    case = build(200, 1001, sources=60).to(torch.float32)
    with Largest() as largest:
        case.chunked(chunk=16, compute=compute)
    assert largest.numel <= 2 * 16 * 1001
    plain = replace(case, weights={"ce": case.weights["ce"]})
    with Largest() as largest:
        plain.chunked(chunk=16, compute=compute)
    assert largest.numel <= 16 * 1001  # ce alone: no target logits


@pytest.mark.parametrize(("near", "of_value", "of_gradient"), [(0.1, 1e-5, 1e-5), (0.01, 1e-4, 1e-3)])
def test_nearly_the_target_over_49152_ids(near: float, of_value: float, of_gradient: float) -> None:
    """Against float64 behind the same float32 inputs. Float32 logits are good to about 1e-6, so a gap of `near` between laws to 1e-6 / near."""
    case = build(4, 49_152, sources=4, latents="none", size=48, scale=0.3)
    assert case.rows.target_hidden is not None and case.rows.source is not None
    noise = torch.randn(4, 48, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    case.rows = replace(case.rows, hidden=case.rows.target_hidden[case.rows.source] + near * noise)
    single = case.to(torch.float32)
    for name in naive.POINTWISE:
        alone = replace(single, weights={name: single.weights[name]})
        found, exact = alone.chunked(), alone.exact()
        torch.testing.assert_close(getattr(found[1], name).double(), getattr(exact[1], name).detach(), rtol=of_value, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert relative(found[2]["hidden"], exact[2]["hidden"]) < of_gradient, name


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("scale", [3.0, 10.0, 40.0])
@pytest.mark.parametrize("name", ["kl", "rkl", "jsd", "lk_hybrid", "tv"])
def test_laws_as_far_apart_as_logits_go(name: str, scale: float, fused: bool) -> None:
    """Log-ratios of hundreds: exp of them is no number, the loss is."""
    if fused and not can_fuse(torch.device("cpu")):
        pytest.skip("nothing here to compile with")
    case = build(12, vocab=50, scale=scale, names=(name,))
    _, want, want_grads = case.exact()
    for dtype, tolerance in ((DOUBLE, 1e-9), (torch.float32, 2e-4)):
        value, losses, grads = case.to(dtype).chunked(chunk=5, compute=dtype, fused=fused)
        assert value.isfinite() and getattr(losses, name).isfinite().all()
        torch.testing.assert_close(getattr(losses, name).double(), getattr(want, name), rtol=tolerance, atol=tolerance * scale)
        for key, grad in grads.items():
            assert grad.isfinite().all()
            if dtype == DOUBLE:
                torch.testing.assert_close(grad, want_grads[key], rtol=1e-8, atol=1e-8)
