"""Sums over the ranks of a distributed run; alone, a rank is the whole world."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import distributed, nn

LEAST = 1e-6  # keeps an empty denominator from dividing by zero (DeepSpec)


def world() -> int:
    """Number of ranks."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum of `values` (no graph) over all ranks, on every rank."""
    if world() == 1:
        return values
    out = values.detach().clone()
    distributed.all_reduce(out)
    return out


def over_step(own: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Denominators of the whole step by part: those that are `known`, or these of every rank added up."""
    if known is not None:
        return {name: known[name] for name in own}
    return dict(zip(own, total(torch.stack(list(own.values()))), strict=True))


def touched(module: nn.Module, *states: torch.Tensor) -> torch.Tensor:
    """0, with a graph to every parameter: ranks reduce the same gradients, those without slots and unused heads included.

    Parameters that are sharded while this is asked are reached through `states`, which they made.
    """
    whole = [parameter for parameter in module.parameters() if not hasattr(parameter, "placements")]
    value = sum((parameter.sum() for parameter in whole), whole[0].new_zeros(()))
    if len(whole) < sum(1 for _ in module.parameters()):
        value = value + sum(state.sum() for state in states)
    return value * 0.0
