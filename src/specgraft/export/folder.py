"""A folder that appears whole or not at all, and never replaces what this project did not write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

FILES = ("config.json", "model.safetensors", "drafter.gguf", "README.md", "provenance.json")  # what an export may hold
WRITER = "specgraft export"


def refuse_foreign(folder: Path) -> None:
    """Raises ValueError naming what is in the way; an absent or empty folder and an older export are fine."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder}: is no folder; move it away or use another run.name")
    if not folder.is_dir():
        return
    found = sorted(path.name for path in folder.iterdir())
    if not found:
        return
    foreign = [name for name in found if name not in FILES or (folder / name).is_dir()]
    if foreign:
        raise ValueError(
            f"{folder}: holds {foreign[0]}, which export did not write; move it away or use another run.name"
        )
    if not _ours(folder):
        raise ValueError(f"{folder}: was not written by specgraft; move it away or use another run.name")


def _ours(folder: Path) -> bool:
    try:
        return json.loads((folder / "provenance.json").read_text(encoding="utf-8")).get("writer") == WRITER
    except (OSError, ValueError, AttributeError):
        return False


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary folder beside `folder`, then puts that in its place.

    Raises ValueError naming the folder when the disk refuses; what was there stays.
    """
    refuse_foreign(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    before = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.parent.glob(f".{folder.name}.*.tmp"), *folder.parent.glob(f".{folder.name}.*.old")):
            _remove(stale)
        temporary.mkdir()
        fill(temporary)
        for name in FILES:
            if (temporary / name).exists():
                with (temporary / name).open("rb") as handle:
                    os.fsync(handle.fileno())
        if folder.exists():
            folder.rename(before)
        temporary.rename(folder)
        _remove(before)
    except (OSError, SafetensorError) as error:
        if before.exists() and not folder.exists():
            before.rename(folder)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{folder}: could not be written ({reason}); free space or set run.root") from None
    finally:
        _remove(temporary)


def _remove(folder: Path) -> None:
    """Deletes our own files and then the folder, if nothing else is in it."""
    if not folder.is_dir():
        return
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
