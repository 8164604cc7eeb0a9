"""Training on features of every medium: the same numbers, bit for bit, where every row is forwarded alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specgraft.log import read_metrics
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.train.checkpoint import checkpoints

OVERRIDES = ["capture.batch_tokens=1", "train.steps=50", "train.checkpoint_every=50", "train.validate_every=25", "train.rows=2", "train.anchors=2"]


def losses(root: Path) -> list[Any]:
    keys = ("step", "loss", "grad_norm", "alpha", "survival", "alpha_survival")
    return [[row.get(key) for key in keys] for row in read_metrics(root / "metrics.jsonl")]


def test_fifty_steps_in_memory_hybrid_and_from_disk_have_identical_losses(make_run_file: Callable[[Path], Path], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run_file = make_run_file(tmp_path)
    first = Session(load_config(run_file, OVERRIDES))
    try:
        first.regen()
        weights, found = {}, {}
        for medium in ("memory", "hybrid", "disk"):
            work = Session(load_config(run_file, [*OVERRIDES, f"stream.medium={medium}"]))
            work.train()  # the shards that "disk" reads are those that "hybrid" kept
            assert work.run.features.exists() == (medium != "memory")
            found[medium] = losses(work.run.root)
            weights[medium] = load_file(checkpoints(work.run.checkpoints)[-1] / "drafter.safetensors")
            work.run.checkpoints.rename(work.run.root / f"{medium}-checkpoints")
            work.run.metrics.unlink()
        work.run.features.rename(work.run.root / "kept")
        work.capture()
        work.train()
        found["captured"], weights["captured"] = losses(work.run.root), load_file(checkpoints(work.run.checkpoints)[-1] / "drafter.safetensors")
    finally:
        torch.set_num_threads(threads)
    assert len(found["disk"]) == 52 and found["memory"] == found["hybrid"] == found["disk"] == found["captured"]
    for medium in ("memory", "hybrid", "captured"):
        assert all(torch.equal(weights["disk"][name], value) for name, value in weights[medium].items())
