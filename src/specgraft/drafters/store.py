"""A drafter on disk: config.json and drafter.safetensors, written whole and checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.registry import build

WEIGHTS = "drafter.safetensors"


def save_drafter(folder: Path, drafter: Drafter) -> None:
    """Writes config and float32 weights into an existing folder (the caller renames the folder when it is complete)."""
    save_file({name: tensor.detach().float().cpu().contiguous() for name, tensor in drafter.state_dict().items()}, folder / WEIGHTS)
    save_config(folder, drafter.config)


def save_config(folder: Path, config: DrafterConfig) -> None:
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """Reads a drafter for inference. Raises ValueError, in one line, for a folder that is missing or damaged."""
    if not (folder / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder}: holds no drafter (config.json and {WEIGHTS}); run train first")
    try:
        drafter = build(DrafterConfig.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise ValueError(f"{folder}: damaged ({str(error).splitlines()[0]}); use another checkpoint") from None
    have, want = set(tensors), set(drafter.state_dict())
    if have != want:
        raise ValueError(f"{folder}: tensors {', '.join(sorted(have ^ want)[:3])} are missing or unknown")
    for name, tensor in drafter.state_dict().items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{folder}: {name} is {tuple(tensors[name].shape)}, its config says {tuple(tensor.shape)}; use another checkpoint")
    drafter.load_state_dict(tensors)
    return drafter.to(device=device, dtype=dtype).requires_grad_(False).eval()
