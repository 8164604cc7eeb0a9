"""Matrix products of chunks: few rows against a long matrix."""

from __future__ import annotations

import torch
from torch.nn import functional as F

SIZES = 16  # oneDNN compiles code for every number of rows and keeps it, a quarter to half a MiB each: few numbers, then


class Products:
    """Products with operands in `kind`: float32, float64, or bfloat16.

    bfloat16: CUDA sums and returns float32; the CPU library returns bfloat16, so logits are rounded there (relative 2^-9):
    fit for training, not for reporting. float32 on a CPU goes through oneDNN, which for 64 to 200 rows took 0.6 to 0.75 of
    the processor time of `torch.mm` (MKL, Zen 4, V = 49,152); where a build lacks it, through `torch.mm`.
    """

    def __init__(self, kind: torch.dtype, device: torch.device) -> None:
        self.kind = kind
        self.narrow = kind not in (torch.float32, torch.float64)
        self.result = torch.float32 if self.narrow and device.type == "cuda" else kind
        self.cpu = device.type == "cpu"
        linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
        self.linear = linear if self.cpu and kind == torch.float32 and torch.backends.mkldnn.enabled else None

    def rows(self, left: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """left [C,K], matrix [V,K] in `kind` -> left @ matrix.T in the first C rows of out, which is in `result`."""
        left, out = left.to(self.kind), out[: len(left)]
        if self.linear is not None:  # it has no `out`: a stretch of ids at a time
            left = filled(left)
            for place, part in zip(out.split(8192, 1), matrix.split(8192), strict=True):
                place.copy_(self.linear(left, part, None, "none", [], "")[: len(out)])
        elif self.result != self.kind:
            out.copy_(self._mm(left, matrix.T))
        elif self.narrow and len(left) % SIZES:
            out.copy_(torch.mm(filled(left), matrix.T)[: len(out)])
        else:
            torch.mm(left, matrix.T, out=out)
        return out

    def back(self, grad: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """grad [C,V], matrix [V,K] -> grad @ matrix [C,K]."""
        grad = grad.to(self.kind)
        if self.cpu and not self.narrow:  # MKL is a tenth faster this way round
            return torch.mm(matrix.T, grad.T).T
        return self._mm(filled(grad) if self.cpu else grad, matrix)[: len(grad)]

    def onto(self, total: torch.Tensor, grad: torch.Tensor, left: torch.Tensor) -> None:
        """total [V,K] += grad.T @ left; grad [C,V], left [C,K]."""
        grad, left = grad.to(self.kind), left.to(self.kind)
        if self.narrow:  # a stretch of ids at a time: no second [V,K]
            if self.cpu:
                grad, left = filled(grad), filled(left)
            for part, ids in zip(total.split(4096), grad.split(4096, 1), strict=True):
                part.add_(self._mm(ids.T, left))
        else:
            total.addmm_(grad.T, left)

    def _mm(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if self.result != self.kind:
            return torch.mm(left, right, out_dtype=self.result)
        return torch.mm(left, right)


def filled(rows: torch.Tensor) -> torch.Tensor:
    """rows [C,..] with zeros behind them, up to a multiple of SIZES."""
    more = -len(rows) % SIZES
    return F.pad(rows, (0, 0, 0, more)) if more else rows
