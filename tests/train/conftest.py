"""A captured run of a tiny target, ready to be trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specgraft.capture.stage import capture, feature_header
from specgraft.config import RunConfig
from specgraft.records import Conversation, ids_digest
from specgraft.run import Session
from specgraft.run_dir import RunDir
from specgraft.run_file import load_config
from specgraft.targets.model import Target
from specgraft.train.checkpoint import checkpoints
from specgraft.train.stage import train

SECTIONS: dict[str, dict[str, Any]] = {
    "target": {"id": "tiny", "dtype": "float32", "mask_token_id": 0},
    "capture": {"taps": [0, 2]},
    "drafters": {"draft_tokens": 3, "layers": 1, "markov_rank": 8},
    "train": {
        "steps": 6, "rows": 4, "anchors": 6, "lr": 3e-3, "warmup": 0.2, "compute": "float32", "checkpoint_every": 3,
        "validate_every": 2, "validate_rows": 3,
    },
}  # fmt: skip


def answers() -> list[Conversation]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(13):
        ids = torch.randint(2, 64, (14 + number,), generator=generator).tolist()
        prompt = 4 + number % 3
        found.append(
            Conversation(
                f"p{number}", "f", "en", "chat", "heldout" if number < 3 else "train", ids,
                [False] * prompt + [True] * (len(ids) - prompt), prompt, 0.0, 1.0, 0, "length", ids_digest(ids[prompt:]),
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Ready:
    """A run folder with features, and what it takes to train on them with objects made anew."""

    run: RunDir
    new_target: Callable[[], Target]

    def config(self, **changes: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate({name: {**SECTIONS.get(name, {}), **changes.get(name, {})} for name in {*SECTIONS, *changes}})

    def train(self, score: Callable[[Target], Any] | None = None, **changes: dict[str, Any]) -> None:
        """`score` makes the scorer of branches for a target."""
        config, target = self.config(**changes), self.new_target()
        train(config, self.run, target, feature_header(config, target), answers(), score(target) if score else None)


@pytest.fixture(scope="session")
def captured(tiny_target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = RunConfig.model_validate(SECTIONS)
    run = RunDir(tmp_path_factory.mktemp("captured") / "run").create()
    capture(config, run, tiny_target(markov=3.0), answers())
    return run.root


@pytest.fixture
def ready(captured: Path, tiny_target, tmp_path: Path) -> Callable[[str], Ready]:
    """A fresh copy of the captured run by name."""

    def make(name: str = "run") -> Ready:
        return Ready(RunDir(Path(shutil.copytree(captured, tmp_path / name))), lambda: tiny_target(markov=3.0))

    return make


@pytest.fixture
def broken_off(ready, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunDir, RunDir]]:
    """Trains twice, the second time broken off in its sixth step and gone on with; their checkpoints are the same bit for bit."""

    def make(module: Any, step: str, *args: Any, **changes: Any) -> tuple[RunDir, RunDir]:
        straight, stopped = ready("straight"), ready("stopped")
        straight.train(*args, **changes)
        real, calls = getattr(module, step), []

        def stop(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, step, stop)
            stopped.train(*args, **changes)
        assert [path.name for path in checkpoints(stopped.run.checkpoints)] == ["step-000003"]
        stopped.train(*args, **changes)
        for a, b in zip(checkpoints(straight.run.checkpoints), checkpoints(stopped.run.checkpoints), strict=True):
            for name in ("drafter.safetensors", "optimizer.safetensors"):
                left, right = load_file(a / name), load_file(b / name)
                assert set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left), (a.name, name)
        return straight.run, stopped.run

    return make


@pytest.fixture
def captured_twice() -> Callable[[Path, list[str]], tuple[Session, Path]]:
    """A run up to its capture, and a copy of its folder, `whole` beside it, to be trained undisturbed."""

    def made(run_file: Path, overrides: list[str]) -> tuple[Session, Path]:
        work = Session(load_config(run_file, overrides))
        work.regen()
        work.capture()
        return work, shutil.copytree(work.run.root, work.run.root.with_name("whole"))

    return made
