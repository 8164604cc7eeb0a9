"""Short causal convolutions over the slots of a block, around one sublayer (DFlash2; algorithms.md 2.8).

Layout as z-lab, NeMo, speculators, SGLang and vLLM load it; each slot sets its own kernels from the sublayer's input.
Legend: S slots a block, D channels, K taps, g channels a group, sides 0 before and 1 behind the sublayer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

TAPS = 2  # the slot itself and the one before it


class BlockConvolution(nn.Module):
    """`base_kernel` [2,K,D] and a correction [2,K,D/g] from `kernel_projection`, shared by the g neighbouring channels of a
    group. Starts as the identity. Raises ValueError where groups do not fill the channels."""

    def __init__(self, hidden: int, group: int, taps: int = TAPS) -> None:
        super().__init__()
        if group < 1 or hidden % group:
            raise ValueError(f"drafters.conv_group={group} must divide the hidden size {hidden}")
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """The identity: tap 0 passes a slot through, nothing else counts."""
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, u: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """u [..,S,D], the normed input: what the sublayer adds to the residual, convolved before and behind it."""
        correction = self.kernel_projection(u).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        y = sublayer(convolve(u, self.base_kernel[0], correction[..., 0, :, :], self.group))
        return convolve(y, self.base_kernel[1], correction[..., 1, :, :], self.group)


def convolve(x: torch.Tensor, base: torch.Tensor, correction: torch.Tensor, group: int) -> torch.Tensor:
    """Sum over taps i of (base[i,c] + correction[s,i,c//g]) x[s-i,c]; slots before the first count as zero.

    x [..,S,D], base [K,D], correction [..,S,K,D/g]; float32 at least: a bfloat16 kernel near one keeps two digits.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = x.to(wide).unflatten(-1, (-1, group))
    kernel = base.to(wide).unflatten(-1, (-1, group)) + correction.to(wide)[..., None]  # [..,S,K,D/g,g]
    out = kernel[..., 0, :, :] * parts
    for tap in range(1, base.shape[0]):
        out = out + kernel[..., tap, :, :] * F.pad(parts, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
    return out.flatten(-2)
