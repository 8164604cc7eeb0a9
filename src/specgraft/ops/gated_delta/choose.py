"""The gated delta rule by the cheapest correct path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specgraft.ops.gated_delta import chunked, fla
from specgraft.ops.gated_delta.chunked import Record

GatedDelta = Callable[..., tuple[Tensor, Record]]  # `chunked.gated_delta` and whatever else has its arguments


def choose(device: torch.device | str) -> GatedDelta:
    """The path for tensors on this device.

    Measured on a CPU (AMD EPYC, one thread, float32, no gradients), processor milliseconds of `chunked` by C = 64 and 32, and
    of transformers 5.24, which leaves no Record, by its 64. R 1, T 512, H 4, dk = dv = 32: GDN 3.2, 2.0, 3.4; KDA 6.1, 4.6, 54;
    H 16, dk = dv = 128: GDN 44, 36, 58; KDA 91, 72, 479. R 32, T 7, H 16, dk = dv = 128, by C = 7: GDN 34, not 202; KDA 44, not 4943.
    `fla` was not measured (no GPU at hand); it makes one call a chunk, so where texts are long `chunked` may well be faster.
    """
    return fla.gated_delta if fla.available(device) else chunked.gated_delta
