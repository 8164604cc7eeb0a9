"""Checkpoints: weights, optimiser, position, provenance; a folder appears whole or not at all."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specgraft import __version__
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.store import WEIGHTS, load_drafter, save_config, save_drafter
from specgraft.run_dir import read_json
from specgraft.targets.load import digest
from specgraft.train.optimizer import Optimizer
from specgraft.train.parallel.group import Group
from specgraft.train.parallel.sharded import put, write_parts

OPTIMIZER = "optimizer.safetensors"
AHEAD = "branches.safetensors"  # drawn and not yet learnt from (`train.ahead`), where there are any
STATE = "state.json"
BEST = "best.json"  # beside the checkpoints: accept lengths of those that were decoded


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


def decoded(root: Path) -> dict[int, dict[str, float]]:
    """What decoding at checkpoints has measured, by step. Raises ValueError for a damaged file."""
    if not (root / BEST).exists():
        return {}
    try:
        return {int(step): dict(found) for step, found in read_json(root / BEST)["decoded"].items()}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{root / BEST}: damaged; delete it, and the checkpoints are decoded again as training goes on") from None


def best_of(root: Path) -> Path | None:
    """The checkpoint of the highest accept length in real decoding (of equals the first); None where none was decoded."""
    there = set(checkpoints(root))
    known = {step: found for step, found in sorted(decoded(root).items()) if checkpoint_folder(root, step) in there}
    return checkpoint_folder(root, max(known, key=lambda step: known[step]["accept_length"])) if known else None


def named(root: Path, name: Path | None) -> Path:
    """A checkpoint by its folder, as `best`, or as `latest` (also where none is named). Raises ValueError where there is none."""
    if name is None or str(name) == "latest":
        return latest(root)
    if str(name) != "best":
        return name
    found = best_of(root)
    if found is None:
        raise ValueError(f"{root}: no checkpoint was decoded; set train.decode_prompts before training, or name a folder")
    return verify(found)


def save(
    root: Path, step: int, drafter: Drafter, optimizer: Optimizer, settings: dict[str, Any], keep: int,
    ahead: Mapping[str, torch.Tensor] | None = None, group: Group | None = None, sharded: bool = False,
) -> Path:  # fmt: skip
    """Writes step-NNNNNN beside the others and deletes all but the `keep` newest and the best.

    `ahead`: what is drawn already. `group`: ranks that all call; where drafter and optimiser are `sharded` each writes its part, else
    one writes. Raises ValueError naming the folder, on all ranks, when the disk refuses; what was there stays.
    """
    group = group or Group()
    folder = checkpoint_folder(root, step)
    temporary = root / f".{folder.name}.tmp"

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()

    def write() -> None:
        save_drafter(temporary, drafter)
        save_file(optimizer.tensors(), temporary / OPTIMIZER)

    def write_all() -> None:
        write_parts(temporary, {WEIGHTS: drafter.state_dict(), OPTIMIZER: optimizer.tensors()}, group)
        if group.leads:
            save_config(temporary, drafter.config)

    def seal() -> None:
        if ahead:
            save_file(dict(ahead), temporary / AHEAD)
        files = {path.name: digest(path) for path in sorted(temporary.glob("*.safetensors"))}
        state = {"step": step, "settings": settings, "sha256": files, "provenance": provenance()}
        (temporary / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        best = best_of(root)
        for old in checkpoints(root)[:-keep]:
            if old != best:
                shutil.rmtree(old)

    def refusing(call: Callable[[], None]) -> Callable[[], None]:
        def tried() -> None:
            try:
                call()
            except (OSError, SafetensorError) as error:
                shutil.rmtree(temporary, ignore_errors=True)
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
                raise ValueError(f"{folder}: could not be written ({reason}); free space or set run.root") from None

        return tried

    group.lead(refusing(begin))
    if sharded:
        group.alike(refusing(write_all))
    else:
        group.lead(refusing(write))
    group.lead(refusing(seal))
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read. Filled by `read`."""

    step: int  # to go on from
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    ahead: dict[str, torch.Tensor]  # drawn and not yet learnt from

    def put(self, drafter: Drafter, optimizer: Optimizer) -> int:
        """Loads both in place, however they hold their tensors, and returns the step."""
        put(drafter, self.weights)
        optimizer.load(self.moments, self.step)
        return self.step


def read(folder: Path, config: DrafterConfig, settings: dict[str, Any]) -> Saved:
    """The checkpoint of a drafter of this shape. Raises ValueError naming the setting when it was made with others."""
    verify(folder)
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        moments = load_file(folder / OPTIMIZER)
        ahead = load_file(folder / AHEAD) if AHEAD in state["sha256"] else {}
        before, step = dict(state["settings"]), int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = f"{STATE} lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ValueError(f"{folder}: damaged ({reason}); delete it to go on from the one before") from None
    stored = load_drafter(folder)
    shape = {f"drafter.{key}": value for key, value in config.to_json().items()}
    settings = {**settings, **shape}  # the mask token and what else comes from the target
    before |= {f"drafter.{key}": value for key, value in stored.config.to_json().items()}
    # the run file's own keys first: they are what a user can set back
    for key in sorted(set(settings) | set(before), key=lambda key: (key in shape, key)):
        if before.get(key) != settings.get(key):
            raise ValueError(
                f"{folder}: trained with {key}={before.get(key)!r}, now {settings.get(key)!r}; "
                f"set it back, use another run.name, or delete {folder.parent}"
            )
    return Saved(step, dict(stored.state_dict()), moments, ahead)
