"""The law a token is drawn from: temperature, top-k, top-p by hand, and draws that are exact inverses of the CDF."""

from __future__ import annotations

import pytest
import torch

from specgraft.ops.sampling import Law, distribution, distributions, draw, uniforms

LAW = torch.tensor([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "expected"),
    [
        (1.0, 1.0, 0, [0.5, 0.3, 0.15, 0.05]),
        (0.0, 1.0, 0, [1, 0, 0, 0]),
        (0.0, 0.1, 3, [1, 0, 0, 0]),
        (0.5, 1.0, 0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (1.0, 1.0, 2, [0.625, 0.375, 0, 0]),
        (1.0, 1.0, 9, [0.5, 0.3, 0.15, 0.05]),
        (1.0, 0.5, 0, [1, 0, 0, 0]),
        (1.0, 0.6, 0, [0.625, 0.375, 0, 0]),  # the token that crosses the limit stays
        (1.0, 0.9, 0, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1.0, 0.7, 3, [0.625, 0.375, 0, 0]),  # top-k first, then top-p on what is left
    ],
)
def test_law_by_hand(temperature: float, top_p: float, top_k: int, expected: list[float]) -> None:
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        found = distribution(LAW.log()[order].expand(2, 4), temperature, top_p, top_k)
        assert found.dtype == torch.float32
        for row in found:
            assert row.tolist() == pytest.approx([expected[i] for i in order], abs=1e-6)


def test_rows_of_different_laws_are_each_their_own() -> None:
    logits = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(0))
    rows = [Law(0.0), Law(1.0), Law(0.7, 0.9), Law(1.0), Law(1.3, 1.0, 2)]
    found = distributions(logits, rows)
    for row, law in enumerate(rows):
        assert torch.equal(found[row], distribution(logits[row], law.temperature, law.top_p, law.top_k))


def test_draw_inverts_the_cumulative_law_exactly() -> None:
    levels = torch.tensor([0.0, 0.49999, 0.5, 0.74999, 0.75, 0.875, 0.999999], dtype=torch.float64)
    law = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).expand(len(levels), 4)
    assert draw(law, levels).tolist() == [0, 0, 1, 1, 2, 3, 3]


def test_draw_never_returns_a_token_without_mass() -> None:
    law = torch.tensor([[0.0, 0.3, 0.0, 0.3, 0.0]])
    edge = 1 - 2**-53
    assert draw(law.expand(4, 5), torch.tensor([0.0, 0.5, 0.999, edge], dtype=torch.float64)).tolist() == [1, 3, 3, 3]


def test_draws_follow_the_law() -> None:
    count = 20_000
    drawn = draw(LAW.expand(count, 4), uniforms(0, "law", count))
    expected = LAW.double() * count
    chi_square = float(((torch.bincount(drawn, minlength=4) - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # three degrees of freedom, one in a thousand


def test_uniforms_depend_on_seed_and_name_alone() -> None:
    first = uniforms(0, "a", 8)
    assert torch.equal(first, uniforms(0, "a", 8)) and torch.equal(first, uniforms(0, "a", 20)[:8])
    assert not torch.equal(first, uniforms(1, "a", 8)) and not torch.equal(first, uniforms(0, "b", 8))
    assert first.dtype == torch.float64 and bool(((first >= 0) & (first < 1)).all())
