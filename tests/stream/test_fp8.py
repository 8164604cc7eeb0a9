"""Codes are the nearest e4m3 values, scales take the largest value to 448, and the error is what e4m3 can hold."""

from __future__ import annotations

import pytest
import torch

from specgraft.stream.fp8 import CODES, LARGEST, decode, encode, round_trip_error

# every finite value of e4m3 by its definition (OCP 8-bit floating point, 2023): bias 7, three bits of mantissa, subnormals below
# 2^-6, no infinities, and the code of all ones is no number
VALUES = sorted(
    {
        sign * ((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)
        for sign in (1, -1)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def nearest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle, in float64: distance of x to the nearest value, and the nearest value."""
    table = torch.tensor(VALUES, dtype=torch.float64)
    distance = (x.double()[..., None] - table).abs()
    best = distance.min(-1)
    return best.values, table[best.indices]


def naive(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as float64 values, and scales."""
    scale = states.double().abs().amax(-1) / LARGEST
    return nearest(states.double() / scale[..., None])[1], scale


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Directions of very unlike size, as hidden states have."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    outliers = 1 + 500.0 * (torch.rand(shape[-1], generator=generator) < 0.05)
    return (torch.randn(*shape, generator=generator) * size * outliers).to(dtype)


def test_the_table_of_values_is_the_one_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).double()
    assert sorted(set(codes[codes.isfinite()].tolist())) == VALUES
    assert max(VALUES) == LARGEST == torch.finfo(CODES).max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5, 33), (40, 64)])
def test_codes_are_the_nearest_values_of_a_float64_oracle(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = states(*shape, dtype=dtype)
    codes, scale = encode(x)
    assert codes.dtype == CODES and scale.dtype == torch.float32 and scale.shape == x.shape[:-1]
    wanted, exact_scale = naive(x)
    torch.testing.assert_close(scale.double(), exact_scale, rtol=1e-6, atol=0)
    distance, _ = nearest(x.double() / exact_scale[..., None])
    mine = (x.double() / exact_scale[..., None] - codes.double()).abs()
    assert (mine <= distance * (1 + 1e-5) + 1e-5 * wanted.abs()).all()  # another value only where two are as near
    assert (codes.double() == wanted).double().mean() > 0.99


def test_values_come_back_within_what_three_bits_of_mantissa_hold() -> None:
    x = states(50, 3, 96, dtype=torch.float32)
    codes, scale = encode(x)
    error = (decode(codes, scale, torch.float32) - x).abs()
    top = x.abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x.abs() / 16, top / 458_752) * (1 + 1e-5)).all()
    assert (error[x.abs() == top] <= 1e-6 * top.flatten(0, 1).max()).all()  # the largest value is exact but for the scale
    mean, worst = round_trip_error(x, codes, scale)
    assert 0.01 < mean < 0.035 and mean < worst < 1 / 16


def test_every_token_and_tap_has_a_scale_of_its_own() -> None:
    """One tap a thousand times another, one token another: neither costs the other its bits."""
    x = states(4, 2, 32, dtype=torch.float32)
    x[:, 1] *= 1_000
    x[2] *= 1e-4
    codes, scale = encode(x)
    for token in range(4):
        for tap in range(2):
            alone, own = encode(x[token, tap])
            assert torch.equal(codes[token, tap].view(torch.uint8), alone.view(torch.uint8)) and scale[token, tap] == own


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_and_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (info.max, info.tiny, 1.0):
        x = torch.tensor([[value, -value, 0.0, value / 3]], dtype=dtype)
        back = decode(*encode(x), dtype)
        assert torch.isfinite(back).all() and back[0, 2] == 0
        torch.testing.assert_close(back, x, rtol=1 / 16, atol=0)
    zero = torch.zeros(2, 4, dtype=dtype)
    assert torch.equal(decode(*encode(zero), dtype), zero)
