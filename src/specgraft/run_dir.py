"""Where the files of a run live, and how they are written: to a temporary name, then renamed."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Every stage finds its input and leaves its output here."""

    root: Path

    @property
    def config(self) -> Path:  # the resolved run config
        return self.root / "config.json"

    @property
    def prompts(self) -> Path:  # the drawn mix: train.jsonl, heldout.jsonl, mix.json
        return self.root / "prompts"

    @property
    def regen(self) -> Path:  # answered conversations, one JSONL file a group
        return self.root / "regen"

    @property
    def data(self) -> Path:  # counts of the answered text
        return self.root / "data.json"

    @property
    def features(self) -> Path:  # safetensors shards and manifest.json
        return self.root / "features"

    @property
    def checkpoints(self) -> Path:  # step-000100/ ...
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def board(self) -> Path:  # the same numbers for TensorBoard
        return self.root / "tensorboard"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluate.json"

    @property
    def confidence(self) -> Path:  # calibration of the confidence head, for schedules of verification
        return self.root / "confidence.json"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def bench(self) -> Path:  # an engine with and without drafters: a file a cell, and bench.json
        return self.root / "bench"

    @property
    def overfit(self) -> Path:  # what the overfit check measured, and of which drafter
        return self.root / "overfit.json"

    @property
    def gates(self) -> Path:
        return self.root / "gates.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def timing(self) -> Path:  # seconds of every stage, summed over resumed runs
        return self.root / "timing.json"

    def create(self) -> RunDir:
        """Makes the folder. Raises ValueError, in one line, where that is impossible."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.root}: cannot be created ({error.strerror}); set run.root") from None
        return self


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing. Raises ValueError naming the file, for a full disk too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        remedy = "free space or set run.root" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another place, or set run.root"
        raise ValueError(f"{path}: could not be written ({error.strerror}); {remedy}") from None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"{path}: damaged; delete it and run its stage again")
        return value
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; run the stage that writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: damaged; delete it and run its stage again") from None
