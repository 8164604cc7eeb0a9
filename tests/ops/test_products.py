"""Head products: the same whatever the number of rows, and of few shapes, as the CPU library keeps code for each."""

from __future__ import annotations

import pytest
import torch

from specgraft.ops.vocab_loss.products import SIZES, Products

MOST = 128


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(40, 24, generator=torch.Generator().manual_seed(0))


def test_rows_of_any_number_are_multiplied_in_few_shapes(matrix, monkeypatch) -> None:
    products, seen = Products(torch.float32, torch.device("cpu")), set()
    real = products.linear
    if real is None:
        pytest.skip("this torch has no oneDNN")

    def linear(left: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(len(left))
        return real(left, *rest)

    monkeypatch.setattr(products, "linear", linear)
    for rows in (1, 7, 16, 17, 33, 50, 64, 79, 96, 100, 127, MOST):
        left = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
        out = torch.full((MOST, 40), torch.nan)
        found = products.rows(left, matrix, out)
        torch.testing.assert_close(found, left @ matrix.T)
        assert found.data_ptr() == out.data_ptr() and bool(out[rows:].isnan().all())
    assert not {size % SIZES for size in seen} - {0}
