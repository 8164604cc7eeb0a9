"""What is left behind by a step: nothing. Rollouts and trees come in other shapes every time, and runs have thousands of steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from specgraft.drafters.shared import Shared
from specgraft.records import Features
from specgraft.run_file import load_config
from specgraft.targets.model import Target
from specgraft.train.batch import collate, step_generator
from specgraft.train.tasks import task_of


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Circles of references stay, as they do for minutes where millions of objects live."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def answered(target: Target, step: int, taps: tuple[int, ...]) -> list[Features]:
    """Texts of lengths that belong to the step, with what a capture gives for them."""
    found = []
    for row in range(2):
        ids = torch.randint(2, 64, (10 + 2 * step + row,), generator=torch.Generator().manual_seed(10 * step + row))
        seen = target.forward(ids[None], target.cache(1, len(ids)), taps)
        assert seen.taps is not None
        found.append(Features(f"{row}", ids, torch.arange(len(ids)) >= 4, seen.taps[0].clone(), seen.last[0].clone()))
    return found


def live_tensors() -> int:
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("preset", ["ce", "specopd", "draft_opd"])
def test_a_step_leaves_no_tensor_behind(preset: str, tiny_target, tiny_drafter, no_collection) -> None:
    target = tiny_target(markov=8.0, spread=0.2)
    drafter = tiny_drafter(target).requires_grad_(True)
    config = load_config(None, [f"distill.preset={preset}", "distill.fused=off", "drafters.draft_tokens=4", "train.compute=float32"])
    learn = task_of(config, config.distill, target, drafter, Shared.of(target, 0), None)
    ends = target.end_ids if config.distill.origin == "branches" else None
    counts = []
    for step in range(3):
        batch = collate(answered(target, step, drafter.config.taps), 6, 4, 64, step_generator(0, step, "anchors"), target.device, 0, ends)
        outcome = learn(batch, step)
        outcome.loss.backward()
        del batch, outcome
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 2  # the first step makes the gradients
