"""One step from its micro-batches: denominators of all of them first, then a backward at a time; gradients are left in the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from specgraft.distill.batch import Batch
from specgraft.distill.branches import Drawn
from specgraft.distill.counting import Counted
from specgraft.distill.objective import Outcome
from specgraft.distill.ranks import total
from specgraft.train.parallel.module import Stepper
from specgraft.train.tasks import Task
from specgraft.train.told import added


def gradients(
    stepper: Stepper, task: Task, batches: Sequence[Batch], step: int, device: torch.device, drawn: Sequence[Drawn] | None = None
) -> Outcome:
    """What the step says of itself, over all micro-batches and ranks. Every rank must have as many micro-batches.

    `drawn`: of every micro-batch, where it was drawn before.
    """
    given: Sequence[Drawn | None] = drawn or [None] * len(batches)
    if len(batches) == 1:  # ranks sum denominators on the way: nothing is computed twice
        counted = None if given[0] is None else Counted(None, given[0])
        outcomes = [stepper.learn(lambda: task.learn(batches[0].to(device), step, counted), True)]
        return added(outcomes, batches[0].anchors.mask.shape[2])
    every = [stepper.count(partial(task.count, batch.to(device), step, one)) for batch, one in zip(batches, given, strict=True)]
    known = summed(every)
    outcomes = []
    for number, (batch, one) in enumerate(zip(batches, every, strict=True), 1):
        work = partial(task.learn, batch.to(device), step, replace(one, denominators=known))
        outcome = stepper.learn(work, number == len(batches))
        outcomes.append(replace(outcome, loss=outcome.loss.detach(), seconds=both(outcome.seconds, one.seconds)))
    return added(outcomes, batches[0].anchors.mask.shape[2])


def summed(counted: Sequence[Counted]) -> dict[str, torch.Tensor]:
    """Denominators over all micro-batches and ranks."""
    found = [one.denominators for one in counted if one.denominators is not None]
    names = sorted(found[0])
    table = torch.stack([torch.stack([each[name].double() for name in names]) for each in found]).sum(0)
    kinds = [found[0][name].dtype for name in names]
    return {name: value.to(kind) for name, value, kind in zip(names, total(table), kinds, strict=True)}


def both(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
