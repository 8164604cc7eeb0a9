"""Tensors of which every rank holds a part: whole ones from them, and parts from whole ones."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from specgraft.drafters.drafter import Drafter


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all parts of it: then every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_held(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on all ranks, as `like` is held: on its device, and this rank's part of it where that is sharded."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Whole float32 weights by name on the CPU, one by one; where they are sharded, every rank must ask."""
    return {name: whole(tensor.detach()).float().cpu() for name, tensor in drafter.state_dict().items()}


def put(drafter: Drafter, tensors: dict[str, torch.Tensor]) -> None:
    """Puts whole weights into a drafter, however it holds them."""
    drafter.load_state_dict({name: as_held(tensors[name], own) for name, own in drafter.state_dict().items()})
