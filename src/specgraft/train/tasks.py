"""What a step minimises, by `distill.slots`; its random numbers belong to the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgraft.config import DistillSection, RunConfig
from specgraft.distill.batch import Batch
from specgraft.distill.branches import Drawn
from specgraft.distill.counting import Counted, count_branches, count_references, count_rollouts
from specgraft.distill.objective import Outcome, objective
from specgraft.distill.onpolicy import draw, onpolicy, scored
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.targets.model import Target
from specgraft.targets.scoring import Scorer, scorer
from specgraft.train.batch import step_generator


@dataclass(frozen=True)
class Task:
    """A batch, and its step counted from 0. What can be drawn ahead of the step is given back to `count`, or to `learn` in a Counted."""

    learn: Callable[[Batch, int, Counted | None], Outcome]  # with denominators of the whole step, where it has several micro-batches
    count: Callable[[Batch, int, Drawn | None], Counted]
    draw: Callable[[Batch, int], torch.Tensor] | None = None  # branches [B, M, W] by the drafter as it is; None: nothing can be drawn ahead
    score: Callable[[Batch, torch.Tensor], torch.Tensor] | None = None  # the target's states [B, M, W, D] at them

    def __call__(self, batch: Batch, step: int) -> Outcome:
        """A step of one micro-batch."""
        return self.learn(batch, step, None)


def task_of(
    config: RunConfig, options: DistillSection, target: Target, drafter: Drafter, shared: Shared, score: Scorer | None
) -> Task:
    """`score` gives the target's states on branches; None: `target` does."""
    if options.origin == "branches":
        return branches(config, options, target, drafter, shared, score or scorer(target))
    if options.origin == "rollouts":
        return rollouts(config, options, target, drafter)
    return references(config, options, drafter, shared)


def references(config: RunConfig, options: DistillSection, drafter: Drafter, shared: Shared) -> Task:
    seed, compute = config.run.seed, getattr(torch, config.train.compute)

    def learn(batch: Batch, step: int, counted: Counted | None) -> Outcome:
        known = None if counted is None else counted.denominators
        return objective(drafter, shared, batch, options, compute, step_generator(seed, step, "slots"), known)

    return Task(learn, lambda batch, step, _: count_references(drafter, shared, batch, options, compute, step_generator(seed, step, "slots")))


def branches(config: RunConfig, options: DistillSection, target: Target, drafter: Drafter, shared: Shared, score: Scorer) -> Task:
    seed, compute, ends = config.run.seed, getattr(torch, config.train.compute), target.end_ids

    def numbers(step: int) -> torch.Generator:
        return step_generator(seed, step, "branches")

    def learn(batch: Batch, step: int, counted: Counted | None) -> Outcome:
        given = () if counted is None else (counted.denominators, counted.drawn)
        return onpolicy(drafter, shared, batch, options, score, ends, compute, numbers(step), *given)

    def count(batch: Batch, step: int, drawn: Drawn | None) -> Counted:
        return count_branches(drafter, shared, batch, options, ends, compute, numbers(step), drawn)

    return Task(
        learn, count,
        lambda batch, step: draw(drafter, shared, batch, options, compute, numbers(step)),
        lambda batch, tokens: scored(batch, tokens, options, score),
    )  # fmt: skip


def rollouts(config: RunConfig, options: DistillSection, target: Target, drafter: Drafter) -> Task:
    from specgraft.distill.draft_opd import draft_opd, pair

    seed, compute, ends = config.run.seed, getattr(torch, config.train.compute), target.end_ids
    both = pair(target, drafter)

    def learn(batch: Batch, step: int, counted: Counted | None) -> Outcome:
        given = () if counted is None else (counted.denominators, counted.rolled)
        return draft_opd(both, batch, options, compute, step_generator(seed, step, "rollouts"), ends, *given)

    return Task(learn, lambda batch, step, _: count_rollouts(both, batch, options, compute, ends))
