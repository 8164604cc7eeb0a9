"""A published checkpoint on disk: config.json beside safetensors, one file or several with an index. Nothing is unpickled."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Fields:
    """Values of a config.json by name. One that is missing or of another type is an error that names it, never a default."""

    def __init__(self, where: Path, data: dict[str, Any], prefix: str = "") -> None:
        self.where, self.data, self.prefix = where, data, prefix

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def fault(self, name: str, why: str) -> ValueError:
        return ValueError(f"{self.where}: {self.prefix}{name}{why}")

    def value(self, name: str) -> Any:
        if name not in self:
            raise self.fault(name, " is missing, and another value would be another model; add it as its author trained it")
        return self.data[name]

    def typed(self, name: str, kind: type, what: str) -> Any:
        found = self.value(name)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise self.fault(name, f"={found!r} is not {what}")
        return found

    def integer(self, name: str) -> int:
        return int(self.typed(name, int, "a whole number"))

    def real(self, name: str) -> float:
        return float(self.integer(name) if isinstance(self.value(name), int) else self.typed(name, float, "a number"))

    def flag(self, name: str) -> bool:
        return bool(self.typed(name, bool, "true or false"))

    def word(self, name: str) -> str:
        return str(self.typed(name, str, "a word"))

    def items(self, name: str, kind: type) -> tuple[Any, ...]:
        found = self.typed(name, list, "a list")
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in found):
            raise self.fault(name, f"={found!r} does not hold {kind.__name__} values only")
        return tuple(found)

    def part(self, name: str) -> Fields:
        return Fields(self.where, self.typed(name, dict, "an object"), f"{self.prefix}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses a value that makes another model than ours; what is absent or null passes."""
        if name in self and self.data[name] not in allowed:
            only = f", only {' or '.join(repr(value) for value in allowed)}" if allowed else ""
            raise self.fault(name, f"={self.data[name]!r} is not supported{only}")


def read_config(folder: Path) -> Fields:
    """config.json. Raises ValueError for a file that is missing or no JSON object."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a folder that holds a checkpoint") from None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: is no JSON object; fetch it again")
    return Fields(path, data)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint. Raises ValueError naming the file that is missing, damaged or holds a name twice."""
    index = folder / INDEX
    names = [WEIGHTS]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{index}: damaged; fetch it again") from None
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is no file name; fetch it again")
        try:
            tensors = load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / name}: cannot be read ({str(error).splitlines()[0]}); fetch it again") from None
        if twice := set(found) & set(tensors):
            raise ValueError(f"{folder / name}: {min(twice)} is in another file too; fetch it again")
        found |= tensors
    return found


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes a new folder, whole or not at all. Raises ValueError where something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is not empty and nothing is written over; name a new folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{folder}: could not be written ({reason}); free space or name another folder") from None
