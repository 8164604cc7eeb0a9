"""The compiled passes give the values and gradients of the plain ones. Few mixes: each compiles for seconds.

Legend: R rows (slots), U sources, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specgraft.ops.vocab_loss import fused, naive
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.fused import can_fuse
from specgraft.ops.vocab_loss.naive import POINTWISE, Rows, SlotLosses

pytestmark = pytest.mark.skipif(not can_fuse(torch.device("cpu")), reason="torch.compile finds no C++ compiler here")


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Values are right without compiling too, so that it happened is a check of its own."""
    yield
    said = "torch.compile fails" in "".join(capsys.readouterr())
    assert said == (request.node.name == "test_where_it_cannot_compile_values_stay_and_it_says_so")


def case(count: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count + vocab)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    source = torch.randint(0, 9, (count,), generator=generator)
    labels = torch.randint(0, vocab, (count,), generator=generator)
    rows = Rows(random(count, 11), labels, random(9, 11), source, random(9, 5), source)
    return rows, 0.5 * random(vocab, 11), 0.5 * random(vocab, 5)


def run(fused: bool, rows: Rows, head: torch.Tensor, markov: torch.Tensor, names: tuple[str, ...], **options: object):
    leaves = [tensor.clone().requires_grad_() for tensor in (rows.hidden, rows.latent, markov)]
    rows = Rows(leaves[0], rows.labels, rows.target_hidden, rows.source, leaves[1], rows.source)
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.rand(len(rows.labels), generator=generator).to(head.dtype) for name in names}
    value, losses, top = weighted_losses(rows, head, leaves[2], weights, want={"hit", "target_ce"}, fused=fused, **options)  # type: ignore[arg-type]
    return value.detach(), losses, torch.autograd.grad(value, leaves), top


def equal(found: SlotLosses, exact: SlotLosses, tolerance: float) -> None:
    for name, value in exact._asdict().items():
        mine = getattr(found, name)
        assert (mine is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("names", "softcap", "chunk"), [(("ce", "l1", "kl"), 0.0, 8), (POINTWISE, 4.0, 64)])
def test_values_and_gradients_are_those_of_the_plain_passes(names: tuple[str, ...], softcap: float, chunk: int) -> None:
    rows, head, markov = case(23, 37)
    value, losses, grads, _ = run(False, rows, head, markov, names, softcap=softcap, chunk=chunk, compute=torch.float64)
    mine, fused_losses, fused_grads, _ = run(True, rows, head, markov, names, softcap=softcap, chunk=chunk, compute=torch.float64)
    torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-10)
    equal(fused_losses, losses, 1e-10)
    for a, b in zip(fused_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_float32_holds_the_definition_and_bfloat16_products_come_near(names: tuple[str, ...] = ("ce", "l1", "kl")) -> None:
    rows, head, markov = case(23, 1001, torch.float32)
    exact, _, exact_grads, _ = run(False, *(_double(rows), head.double(), markov.double()), names, compute=torch.float64)
    for compute, of_value, of_grad in ((torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 5e-2)):
        value, _, grads, _ = run(True, rows, head, markov, names, compute=compute, chunk=64)
        assert abs(float(value) - float(exact)) < of_value * abs(float(exact))
        for a, b in zip(grads, exact_grads, strict=True):
            assert a.dtype == torch.float32 and float((a.double() - b).norm()) < of_grad * float(b.norm())


def _double(rows: Rows) -> Rows:
    wide = {name: value.double() if value is not None and value.is_floating_point() else value for name, value in vars(rows).items()}
    return Rows(**wide)


def test_values_alone_and_candidates() -> None:
    rows, head, markov = case(23, 37)
    _, exact, exact_top = weighted_losses(rows, head, markov, {}, want={"alpha", "hit", "target_ce"}, compute=torch.float64, top_k=4, chunk=8)
    _, found, top = weighted_losses(rows, head, markov, {}, want={"alpha", "hit", "target_ce"}, compute=torch.float64, top_k=4, chunk=8, fused=True)
    equal(found, exact, 1e-10)
    assert top is not None and exact_top is not None and torch.equal(top, exact_top)
    reference = naive.slot_losses(rows, head, markov)
    assert found.alpha is not None and reference.alpha is not None
    torch.testing.assert_close(found.alpha, reference.alpha, rtol=1e-10, atol=1e-10)


def test_where_it_cannot_compile_values_stay_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        def run(*_: object) -> object:
            raise torch._dynamo.exc.TorchDynamoException("planted")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    for kernel in (fused._law_kernel, fused._draft_kernel):
        monkeypatch.setattr(fused, kernel.__name__, kernel.__wrapped__)
    rows, head, markov = case(23, 37)
    value, losses, grads, _ = run(False, rows, head, markov, ("ce", "l1"), compute=torch.float64)
    mine, fused_losses, fused_grads, _ = run(True, rows, head, markov, ("ce", "l1"), compute=torch.float64)
    torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-10)
    equal(fused_losses, losses, 1e-10)
    for a, b in zip(fused_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
