"""Checkpoints: weights, optimiser, position, provenance; a folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specgraft import __version__
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.store import WEIGHTS, load_drafter, save_drafter
from specgraft.targets.load import digest
from specgraft.train.optimizer import Optimizer

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


def provenance() -> dict[str, Any]:
    """argv, versions and git commit of this process."""
    import transformers

    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "argv": sys.argv,
        "specgraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "threads": torch.get_num_threads(),
    }


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / STATE).is_file())


def latest(root: Path) -> Path:
    """The newest checkpoint. Raises ValueError when there is none."""
    found = checkpoints(root)
    if not found:
        raise ValueError(f"{root}: holds no checkpoint; run train first")
    return verify(found[-1])


def save(
    root: Path, step: int, drafter: Drafter, optimizer: Optimizer, settings: dict[str, Any], keep: int
) -> Path:
    """Writes step-NNNNNN beside the others and deletes all but the `keep` newest.

    Raises ValueError naming the folder when the disk refuses; what was there stays.
    """
    folder = checkpoint_folder(root, step)
    temporary = root / f".{folder.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()
        save_drafter(temporary, drafter)
        save_file(optimizer.tensors(), temporary / OPTIMIZER)
        files = {name: digest(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        state = {"step": step, "settings": settings, "sha256": files, "provenance": provenance()}
        (temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{folder}: could not be written ({reason}); free space or set run.root") from None
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def verify(folder: Path) -> Path:
    """The folder itself. Raises ValueError when a file of the checkpoint is not the one that was saved."""
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))["sha256"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder}: damaged ({STATE}); delete it to go on from the one before") from None
    for name, value in saved:
        if not (folder / name).is_file() or digest(folder / name) != value:
            raise ValueError(f"{folder}: damaged ({name} is not what was saved); delete it to go on from the one before")
    return folder


def restore(folder: Path, drafter: Drafter, optimizer: Optimizer, settings: dict[str, Any]) -> int:
    """Loads weights and optimiser in place and returns the step to go on from.

    Raises ValueError naming the setting when the checkpoint was made with others.
    """
    verify(folder)
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        moments = load_file(folder / OPTIMIZER)
        before, step = dict(state["settings"]), int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = f"{STATE} lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ValueError(f"{folder}: damaged ({reason}); delete it to go on from the one before") from None
    stored = load_drafter(folder)
    shape = {f"drafter.{key}": value for key, value in drafter.config.to_json().items()}
    settings = {**settings, **shape}  # the mask token and what else comes from the target
    before |= {f"drafter.{key}": value for key, value in stored.config.to_json().items()}
    # the run file's own keys first: they are what a user can set back
    for key in sorted(set(settings) | set(before), key=lambda key: (key in shape, key)):
        if before.get(key) != settings.get(key):
            raise ValueError(
                f"{folder}: trained with {key}={before.get(key)!r}, now {settings.get(key)!r}; "
                f"set it back, use another run.name, or delete {folder.parent}"
            )
    drafter.load_state_dict(stored.state_dict())
    optimizer.load(moments, step)
    return step
