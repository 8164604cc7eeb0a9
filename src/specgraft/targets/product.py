"""Products with frozen matrices; on a CPU from a copy in the layout that oneDNN's kernels read.

Measured on two cores (docs/decode.md): one token 1.2 to 1.6 times as fast as with the plain layout, eight tokens 1.7 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

PACK_LIMIT = 4 << 30  # bytes of a model's matrices up to which they are kept twice


class Product:
    """x [.., I] -> x W' + b [.., O] with W [O, I] the matrices of `weights`, one under the other.

    Not packed, the parameters become views of W, so that nothing is kept twice. The numbers are the same ones in either case.
    """

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], pack: bool) -> None:
        self.sources = weights
        self.bias = torch.cat([bias.detach() for bias in biases if bias is not None]) if biases[0] is not None else None
        whole = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        self.packed = pack
        if pack:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(whole, None)
        else:
            self.matrix = whole
            if len(weights) > 1:
                for weight, piece in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
                    weight.data = piece
        self.mark = marks(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")
        return F.linear(x, self.matrix, self.bias)

    @property
    def current(self) -> bool:
        """Whether the parameters are the ones that were read."""
        return marks(self.sources) == self.mark


def marks(weights: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def packs(model: torch.nn.Module) -> bool:
    """Whether this model's products are worth a copy: on a CPU, in a dtype that oneDNN multiplies, small enough."""
    weights = list(model.parameters())
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    if len(kinds) != 1 or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    device, dtype = kinds.pop()
    known = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device == "cpu" and known and sum(weight.numel() * weight.element_size() for weight in weights) <= PACK_LIMIT
