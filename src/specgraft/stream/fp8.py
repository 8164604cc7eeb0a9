"""Hidden states in eight bits: e4m3 codes (OCP 8-bit floating point, the finite `fn` kind) and one scale per state.

Legend: D hidden size; [..] token, or token and tap.
"""

from __future__ import annotations

import torch

CODES = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 2.0**-126  # a scale must divide


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..,D] and scales [..] float32 of finite states [..,D]: scale = max|x| / 448, code = the e4m3 value nearest to x / scale.

    Three bits of mantissa: a value comes back within 1/16 of itself, and one below max|x| / 28,672 within max|x| / 458,752.
    """
    wide = states.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    # the quotient may round to just above 448, which e4m3 has no value for
    codes = (wide / scale[..., None]).clamp(-LARGEST, LARGEST).to(CODES)
    return codes, scale


def decode(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States [..,D] of codes [..,D] and scales [..]."""
    return (codes.float() * scale[..., None]).to(dtype)


def round_trip_error(states: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> tuple[float, float]:
    """Mean and largest relative error |decoded - x| / |x| of states [..,D], each taken whole."""
    wide = states.float()
    error = (decode(codes, scale, torch.float32) - wide).norm(dim=-1) / wide.norm(dim=-1).clamp(min=SMALLEST_SCALE)
    return float(error.mean()), float(error.max())
