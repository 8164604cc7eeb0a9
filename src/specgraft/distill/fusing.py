"""Whether a run compiles its passes over logits."""

from __future__ import annotations

import torch

from specgraft.config import DistillSection
from specgraft.ops.vocab_loss.fused import can_fuse

LONG_RUN = 300  # steps that pay for compiling


def settle(options: DistillSection, device: torch.device, steps: int) -> DistillSection:
    """The options with `fused` settled to "on" or "off". Raises ValueError where it is asked for and cannot be."""
    able = can_fuse(device)
    if options.fused == "on" and not able:
        raise ValueError(f'distill.fused="on": no C++ compiler for torch.compile on {device}; install g++ or clang++, or set it to "off"')
    on = options.fused == "on" or (options.fused == "auto" and able and steps >= LONG_RUN)
    return options.model_copy(update={"fused": "on" if on else "off"})
