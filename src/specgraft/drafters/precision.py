"""In which dtype a drafter computes while it decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specgraft.drafters.drafter import Drafter
from specgraft.drafters.layers import RMSNorm


def at_precision(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """Moves the matrices to `dtype` in place; norms and the confidence head stay float32 when that is a half precision."""
    if dtype in (torch.float32, torch.float64):
        return drafter.to(dtype)
    exact = {id(parameter) for module in drafter.modules() if isinstance(module, RMSNorm) for parameter in module.parameters()}
    if drafter.confidence_head is not None:
        exact |= {id(parameter) for parameter in drafter.confidence_head.parameters()}
    for parameter in drafter.parameters():
        kind = torch.float32 if id(parameter) in exact else dtype
        parameter.data = parameter.data.to(kind)
    return drafter


@contextmanager
def precision(drafter: Drafter) -> Iterator[None]:
    """Half-precision matrices meet float32 norms: autocast turns the inputs of the products, and nothing else."""
    weight = drafter.fc.weight
    half = weight.dtype in (torch.bfloat16, torch.float16)
    with torch.inference_mode(), torch.autocast(weight.device.type, weight.dtype if half else torch.bfloat16, enabled=half):
        yield
