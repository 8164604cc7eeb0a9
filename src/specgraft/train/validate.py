"""Teacher-forced accept length on held-out text: cheap, in the loop. The decode-measured one decides, not this.

Legend: B rows, N anchors, G draft tokens.
"""

from __future__ import annotations

import torch


def survival(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """Mean over anchors of the prefix products of `values`, per slot, over the blocks where that slot is supervised."""
    products = values.cumprod(-1)
    count = mask.sum((0, 1)).clamp(min=1)
    return ((products * mask).sum((0, 1)) / count).tolist()
