"""Writes the folders of `sglang_cases`, asks SGLang about all of them in one process, and keeps what it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from sglang_cases import CHAINS, FORMS, REFUSED, Json, Tensors, inputs, targets, write

from specgraft.drafters.drafter import Drafter
from specgraft.engines.install import installed

FOLDERS = os.environ.get("SPECGRAFT_SGLANG", "")


def where() -> str:
    """What goes on PYTHONPATH. Raises ValueError saying how to get it."""
    if FOLDERS:
        return FOLDERS
    folder = installed("sglang-loader")
    return f"{folder / 'wheel'}{os.pathsep}{folder / 'site'}"


class Answers:
    """What SGLang said of each folder, and what the folder was made of."""

    def __init__(self, root: Path) -> None:
        self.root, self.jobs = root, list[Json]()
        self.drafters: dict[str, Drafter] = {}
        self.given: dict[str, Tensors] = {}
        self.folders: dict[str, Path] = {}
        self.answers: dict[str, Json] = {}
        self.wheel = Path()  # unpacked
        self.targets = targets(root / "targets")

    def ask(self, name: str, folder: Path, drafter: Drafter, **job: Any) -> None:
        given = inputs(drafter.config)
        file = self.root / f"{len(self.jobs)}.safetensors"
        save_file(given, file)
        if "target" in job:
            job["target"] = str(self.targets[job["target"]])
        self.jobs.append({"name": name, "do": "draft", "folder": str(folder), "inputs": str(file), **job})
        self.drafters[name], self.given[name], self.folders[name] = drafter, given, folder

    def run(self, python_path: str) -> None:
        file = self.root / "jobs.json"
        file.write_text(json.dumps(self.jobs))
        script = Path(__file__).with_name("sglang_load.py")
        done = subprocess.run(
            [sys.executable, str(script), str(file)], env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.answers = json.loads(done.stdout.splitlines()[-1])


def ask_all(root: Path, drafter_of: Callable[..., Drafter], export: Callable[..., Path], python_path: str) -> Answers:
    """`export(folder, **shape)` exports a checkpoint for SGLang as a user would."""
    found = Answers(root)
    for name, shape in FORMS.items():
        mode = {} if shape.get("confidence", True) or "kind" in shape else {"mode": "static"}
        found.ask(f"form: {name}", export(root / f"form {name}", **shape), drafter_of(**shape), **mode)
    for kind, shape in CHAINS.items():
        folder = export(root / f"chain {kind}", **shape)
        for target in found.targets:
            found.ask(f"chain: {kind}, {target}", folder, drafter_of(**shape), target=target)
    for name, row in REFUSED.items():
        drafter = drafter_of(**row.shape)
        found.ask(f"refused: {name}", write(root / f"refused {name}", drafter, row.change), drafter, **row.job)
    more = SimpleNamespace(plain=drafter_of(), none=drafter_of(confidence=False))
    found.ask("no confidence, scheduled", write(root / "none", more.none, None), more.none)
    found.ask("gemma", found.folders["form: dspark"], more.plain, do="gemma_embedding")
    for name, dtype, context in (("as exported", "bfloat16", 4096), ("float32", "float32", 4096), ("longer target", "bfloat16", 8192)):
        folder = write(root / name, more.plain, lambda config, tensors, dtype=dtype: config.update(dtype=dtype))
        found.ask(f"settings: {name}", folder, more.plain, do="settings", context=context)
    found.run(python_path)
    found.wheel = next(Path(folder) for folder in python_path.split(os.pathsep) if (Path(folder) / "sglang").is_dir())
    return found


def taps_of(answers: Answers, name: str) -> torch.Tensor:
    """[T, K*D] that SGLang's target handed over in a job with a target."""
    return torch.tensor(answers.answers[name]["taps"])
