"""A run with one checkpoint of a tiny drafter, ready to be exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.config import RunConfig
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.registry import build
from specgraft.drafters.store import save_drafter
from specgraft.run_dir import RunDir, write_json
from specgraft.run_file import validate

SHAPE: dict[str, Any] = {
    "kind": "dspark", "draft_tokens": 5, "layers": 2, "hidden_size": 64, "vocab_size": 272, "heads": 4, "kv_heads": 2,
    "head_dim": 32, "intermediate": 96, "eps": 1e-6, "rope_theta": 1e6, "max_positions": 4096, "taps": (1, 3, 5),
    "target_layers": 8, "mask_token_id": 265, "markov_rank": 16, "confidence": True,
}  # fmt: skip


def drafter_of(**changes: Any) -> Drafter:
    """Random weights in which faults show: deviation 0.15, norms 1 +- 0.3."""
    torch.manual_seed(3)
    drafter = build(DrafterConfig(**{**SHAPE, **changes}))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            parameter.data = 0.7 + 0.6 * torch.rand(parameter.shape)
        else:
            parameter.data = 0.15 * torch.randn(parameter.shape)
    return drafter.requires_grad_(False).eval()


@pytest.fixture
def shape() -> dict[str, Any]:
    return dict(SHAPE)


class Made:
    """A run folder, its config, the drafter and its checkpoint."""

    def __init__(self, root: Path, drafter: Drafter, config: RunConfig) -> None:
        self.run, self.drafter, self.config = RunDir(root / "run").create(), drafter, config
        self.checkpoint = self.run.checkpoints / "step-000120"
        self.checkpoint.mkdir(parents=True)
        save_drafter(self.checkpoint, drafter)
        state = {"step": 120, "settings": {"train.lr": 6e-4}, "provenance": {"commit": "abc"}}
        (self.checkpoint / "state.json").write_text(json.dumps(state))

    def target_says(self, **values: Any) -> None:
        """The features' manifest and the target's own config.json."""
        folder = self.run.root / "target"
        folder.mkdir(exist_ok=True)
        shape = {"num_hidden_layers": 8, "max_position_embeddings": 4096} | values
        (folder / "config.json").write_text(json.dumps(shape))
        manifest = {"target": {"id": str(folder), "weights": "w" * 64}, "hidden_size": 64, "vocab_size": 272} | values
        write_json(self.run.features / "manifest.json", manifest)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Made]:
    """Builds a run; `export` gives the export section, the rest changes the drafter's shape."""

    def build_run(export: dict[str, Any] | None = None, **changes: Any) -> Made:
        return Made(tmp_path, drafter_of(**changes), validate({"export": export or {}}, "test"))

    return build_run


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What SGLang's own code says of all folders of `sglang_cases`, asked once in a process of its own."""
    from sglang_ask import ask_all, where

    try:
        python_path = where()
    except ValueError as error:
        pytest.skip(str(error))

    def exported(root: Path, **shape: Any) -> Path:
        from specgraft.export.stage import export

        made = Made(root, drafter_of(**shape), validate({"export": {"to": "sglang"}}, "test"))
        return export(made.config, made.run, made.checkpoint)

    return ask_all(tmp_path_factory.mktemp("sglang"), drafter_of, exported, python_path)
