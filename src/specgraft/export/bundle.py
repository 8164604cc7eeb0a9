"""Target and drafter in one folder: the target's files linked, never copied or changed, the drafter beside them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from specgraft.export.folder import WRITER
from specgraft.log import say

NOTE = "specgraft-bundle.json"  # what marks a folder as ours, with the digests


def bundle(folder: Path, target: Path, drafter: Path, name: str) -> dict[str, Any]:
    """Makes `folder` anew: links to every file of `target` (a folder or one .gguf), and `drafter` copied to its subfolder `name`.

    SGLang finds a drafter in the subfolder `dspark` of a target by itself. Returns what the note says: sha256 of the target's
    weight files, taken before and again through the links. Raises ValueError for a target that is no folder or file here, a
    `folder` that holds anything else, or weights that are not the same afterwards.
    """
    files = sorted(path for path in target.iterdir() if path.is_file()) if target.is_dir() else [target]
    if not files or not files[0].is_file():
        raise ValueError(f"{target}: no folder or file here; a bundle needs the target's files, set target.id (or export.target_gguf)")
    if any(path.name in (name, NOTE) for path in files):
        raise ValueError(f"{target}: holds {name} or {NOTE} itself; a bundle of a bundle is not made")
    refuse_foreign(folder)
    before = {path.name: _sha256(path) for path in files if path.suffix in (".safetensors", ".gguf", ".bin")}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for path in files:
            (temporary / path.name).symlink_to(path.resolve())
        shutil.copytree(drafter, temporary / name)
        after = {key: _sha256(temporary / key) for key in before}
        note = {"writer": WRITER, "target": str(target), "drafter": name, "target_sha256": after, "unchanged": after == before}
        if not note["unchanged"]:
            raise ValueError(f"{target}: its weights changed while the bundle was made; make it again")
        (temporary / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError as error:
        raise ValueError(f"{folder}: could not be written ({error.strerror}); free space or set run.root") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shown = ", ".join(f"{key} {value[:12]}" for key, value in after.items())
    say(f"bundle: {len(files)} files of the target linked, weights unchanged (sha256 {shown}), drafter in {name}/: {folder}")
    return note


def refuse_foreign(folder: Path) -> None:
    """Raises ValueError naming what is in the way: anything in `folder` but links, the drafter's subfolder and our own note."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder}: is no folder; move it away or use another run.name")
    found = sorted(folder.iterdir())
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        own = {NOTE, note["drafter"]} if note["writer"] == WRITER else set()
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    for path in found:
        if path.name not in own and not (own and path.is_symlink()):
            raise ValueError(f"{folder}: holds {path.name}, which export did not write; move it away or use another run.name")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
