"""Matrix products in a narrow dtype, results in a wide one."""

from __future__ import annotations

import torch


class Products:
    """left @ right with operands in `kind`; float32 results (float64 for float64).

    On CUDA bfloat16 products are summed and returned in float32. The CPU library returns bfloat16, so logits are rounded
    there (relative 2^-9): fit for training, not for reporting.
    """

    def __init__(self, kind: torch.dtype) -> None:
        self.kind = kind
        self.plain = kind in (torch.float32, torch.float64)

    def of(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = left.to(self.kind), right.to(self.kind)
        if self.plain:
            return left @ right
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        return (left @ right).float()

    def into(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """out = left @ right."""
        if self.plain:
            return torch.mm(left.to(self.kind), right.to(self.kind), out=out)
        return out.copy_(self.of(left, right))

    def onto(self, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """out += left @ right."""
        if self.plain:
            return out.addmm_(left.to(self.kind), right.to(self.kind))
        return out.add_(self.of(left, right))
