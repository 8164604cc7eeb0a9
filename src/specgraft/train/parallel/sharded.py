"""Tensors of which every rank holds a part: whole ones from them, in memory and on disk, and parts from whole ones."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor

from specgraft.drafters.drafter import Drafter
from specgraft.train.parallel.group import Group


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


def write_parts(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], group: Group) -> None:
    """Safetensors files of whole tensors, by file name, in an existing folder; every rank calls. No name may be in two files.

    Ranks write their parts side by side, rank 0 puts these together, and every rank reads its own part of the result again: torch takes
    a part that rank 0 does not see (a network disk that lags) for zeros. Raises OSError on all ranks where one of them fails.
    """
    if group.any(not folder.is_dir()):
        raise OSError(errno.ENOENT, "a rank does not see this folder: with train.parallel=\"fsdp\" all machines need the run's folder")
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    numbers = {name: number for number, part in enumerate(files.values(), 1) for name in part}
    try:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True, enable_consolidation=True))
        again = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        dcp.load(again, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:  # of all ranks, on all ranks; no Exception, and of many lines
        reasons = [reason for reason, _ in error.failures.values()]
        raise next((reason for reason in reasons if isinstance(reason, OSError)), OSError(errno.EIO, repr(reasons[0])[:200])) from None
    if group.any(not all(torch.equal(local(again[name]), local(tensor)) for name, tensor in tensors.items())):
        raise OSError(errno.EIO, "what was read again is not what ranks hold")
    if group.leads:
        for number, name in enumerate(files, 1):
            os.replace(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors", folder / name)
        shutil.rmtree(folder / "sharded")
        (folder / "model.safetensors.index.json").unlink()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
