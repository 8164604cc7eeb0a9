"""Losses over the vocabulary: the chunked form equals the definition, values and every gradient."""

from __future__ import annotations

import pytest
import torch

from specgraft.ops.vocab_loss import chunked, naive


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("count", [1, 7, 70])
def test_chunked_equals_naive_in_value_and_every_gradient(count: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    source = torch.randint(0, 9, (count,), generator=generator)
    labels = torch.randint(0, 37, (count,), generator=generator)
    rows = naive.Rows(random(count, 11).requires_grad_(), labels, random(9, 11), source, random(9, 5).requires_grad_(), source)
    head, markov = random(37, 11), random(37, 5).requires_grad_()
    weights = {name: random(count).abs() for name in naive.POINTWISE}
    leaves = [rows.hidden, rows.latent, markov]
    exact = naive.slot_losses(rows, head, markov)
    value = torch.stack([(weights[name] * getattr(exact, name)).sum() for name in weights]).sum()
    found, losses, _ = chunked.weighted_losses(rows, head, markov, weights, want=("hit",), chunk=chunk)
    torch.testing.assert_close(found, value)
    for a, b in zip(losses, exact, strict=True):
        torch.testing.assert_close(a, b.detach())
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(value, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
