"""One step from its micro-batches: denominators of all of them first, then a backward at a time; gradients are left in the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from specgraft.distill.batch import Batch
from specgraft.distill.counting import Counted
from specgraft.distill.objective import Outcome
from specgraft.distill.ranks import total
from specgraft.train.parallel.module import Stepper
from specgraft.train.told import added


@dataclass(frozen=True)
class Task:
    """What a step minimises. A batch, and its step counted from 0."""

    learn: Callable[[Batch, int, Counted | None], Outcome]  # with denominators of the whole step, where it has several micro-batches
    count: Callable[[Batch, int], Counted]

    def __call__(self, batch: Batch, step: int) -> Outcome:
        """A step of one micro-batch."""
        return self.learn(batch, step, None)


def gradients(stepper: Stepper, task: Task, batches: Sequence[Batch], step: int, device: torch.device) -> Outcome:
    """What the step says of itself, over all micro-batches and ranks. Every rank must have as many micro-batches."""
    if len(batches) == 1:  # ranks sum denominators on the way: nothing is computed twice
        outcomes = [stepper.learn(lambda: task.learn(batches[0].to(device), step, None), True)]
        return added(outcomes, batches[0].anchors.mask.shape[2])
    counted = [stepper.count(partial(task.count, batch.to(device), step)) for batch in batches]
    known = summed(counted)
    outcomes = []
    for number, (batch, one) in enumerate(zip(batches, counted, strict=True), 1):
        work = partial(task.learn, batch.to(device), step, replace(one, denominators=known))
        outcome = stepper.learn(work, number == len(batches))
        outcomes.append(replace(outcome, loss=outcome.loss.detach(), seconds=both(outcome.seconds, one.seconds)))
    return added(outcomes, batches[0].anchors.mask.shape[2])


def summed(counted: Sequence[Counted]) -> dict[str, torch.Tensor]:
    """Denominators over all micro-batches and ranks."""
    names = sorted(counted[0].denominators)
    table = torch.stack([torch.stack([one.denominators[name].double() for name in names]) for one in counted]).sum(0)
    kinds = [counted[0].denominators[name].dtype for name in names]
    return {name: value.to(kind) for name, value, kind in zip(names, total(table), kinds, strict=True)}


def both(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
