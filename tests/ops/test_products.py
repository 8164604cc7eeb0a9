"""Head products: the same whatever the number of rows, and of few shapes, as the CPU library keeps code for each."""

from __future__ import annotations

import pytest
import torch

from specgraft.ops.vocab_loss.products import SIZES, Products

MOST = 128


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(40, 24, generator=torch.Generator().manual_seed(0))


COUNTS = (1, 7, 16, 17, 33, 50, 64, 79, 96, 100, 127, MOST)


def test_rows_of_any_number_are_multiplied_in_few_shapes(matrix, monkeypatch) -> None:
    products, seen = Products(torch.float32, torch.device("cpu")), set()
    real = products.linear
    if real is None:
        pytest.skip("this torch has no oneDNN")

    def linear(left: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(len(left))
        return real(left, *rest)

    monkeypatch.setattr(products, "linear", linear)
    for rows in COUNTS:
        left = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
        out = torch.full((MOST, 40), torch.nan)
        found = products.rows(left, matrix, out)
        torch.testing.assert_close(found, left @ matrix.T)
        assert found.data_ptr() == out.data_ptr() and bool(out[rows:].isnan().all())
    assert not {size % SIZES for size in seen} - {0}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_products_are_those_of_the_rows_alone(matrix, kind: torch.dtype, monkeypatch) -> None:
    products, sizes, real = Products(kind, torch.device("cpu")), set(), torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        sizes.update({*left.shape, right.shape[1]} - {*matrix.shape})
        return real(left, right, **more)

    close = 2e-2 if kind == torch.bfloat16 else 1e-5
    matrix = matrix.to(kind)
    for rows in COUNTS:
        generator = torch.Generator().manual_seed(rows)
        left, grad = (torch.randn(rows, width, generator=generator).to(kind) for width in (24, 40))
        total = torch.ones(40, 24, dtype=kind)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "mm", mm)
            found, back = products.rows(left, matrix, torch.empty(MOST, 40, dtype=kind)), products.back(grad, matrix)
            products.onto(total, grad, left)
        for one, other in (
            (found, left.double() @ matrix.double().T), (back, grad.double() @ matrix.double()), (total, 1 + grad.double().T @ left.double()),
        ):  # fmt: skip
            scale = float(other.abs().max())
            torch.testing.assert_close(one.double() / scale, other / scale, rtol=close, atol=close / 10)
    if kind == torch.bfloat16:
        assert not {size % SIZES for size in sizes} - {0}
