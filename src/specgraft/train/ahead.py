"""Steps of branches that are drawn some steps early, so that the target scores them while the trainer learns (`stream.staleness`).

Step n learns from branches that the weights of step n - lag drew (of the first steps: those of the start). That hangs on n alone:
not on how fast the target answers, and a checkpoint keeps what is drawn and not yet learnt from, so that a run that goes on from it
does as one that was never stopped.
Legend: B rows, M branches of a row, W nodes a branch, D hidden size, K branches an anchor, A anchors of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from specgraft.distill.batch import Batch
from specgraft.distill.branches import Drawn
from specgraft.distill.ranks import total
from specgraft.train.parallel.group import Group
from specgraft.train.parallel.module import Stepper
from specgraft.train.shares import Share
from specgraft.train.tasks import Task


@dataclass(frozen=True)
class Turn:
    """One step of this rank. Filled by `Ahead.take`."""

    at: int  # the step whose weights drew for it
    share: Share
    batches: list[Batch]
    drawn: list[Drawn] | None  # of every batch; None: the step draws for itself


class Ahead:
    """The turns of steps `first` .. `stop`-1. Every rank takes each, and all save at the same step."""

    def __init__(
        self, lag: int, first: int, stop: int, shares: Iterator[Share], batches: Callable[[Share], list[Batch]], task: Task,
        stepper: Stepper, group: Group, device: torch.device, kept: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """`batches`: of a share, for this rank; `kept`: what a checkpoint kept (`stored`)."""
        self.lag, self.next, self.stop, self.device = lag, first, stop, device
        self.shares, self.batches, self.task, self.stepper, self.group = shares, batches, task, stepper, group
        self.kept = {int(name.split(":")[0]): (int(name.split(":")[1]), tokens) for name, tokens in kept.items()}
        self.turns: deque[Turn] = deque()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="scoring-ahead")  # the scorer is asked one step at a time
        self.waited = self.sampled = 0.0  # seconds for shares, and of drawing, since they were last `spent`

    def take(self, step: int) -> Turn:
        """The turn of `step`; draws, with the weights as they are, for the step that is `lag` behind it."""
        while self.turns and self.turns[0].share.step < step:  # not before: a step that fails is still to be made
            self.turns.popleft()
        while len(self.turns) <= self.lag and self.next < self.stop:
            self.turns.append(self.begun(self.next, step))
            self.next += 1
        return self.turns[0]

    def begun(self, number: int, now: int) -> Turn:
        began = time.monotonic()
        share = self.group.alike(lambda: next(self.shares))
        batches = self.batches(share)
        self.waited += time.monotonic() - began
        if not self.lag:
            return Turn(number, share, batches, None)
        began = time.monotonic()
        at, drawn = self.drawn(number, now, share, [batch.to(self.device) for batch in batches])
        self.sampled += time.monotonic() - began
        return Turn(at, share, batches, drawn)

    def drawn(self, number: int, now: int, share: Share, batches: list[Batch]) -> tuple[int, list[Drawn]]:
        draw, score = self.task.draw, self.task.score
        assert draw is not None and score is not None, "settings admit a lag for branches alone"
        at, table = self.kept.pop(number, (now, None))
        if table is None:
            tokens = [self.stepper.count(partial(draw, batch, number)) for batch in batches]
        else:
            tokens = spread(share, batches, table)
        return at, [Drawn(each, self.pool.submit(score, batch, each).result) for batch, each in zip(batches, tokens, strict=True)]

    def spent(self) -> tuple[float, float]:
        """Seconds in which shares were waited for, and in which branches were drawn, since the last call."""
        found, self.waited, self.sampled = (self.waited, self.sampled), 0.0, 0.0
        return found

    def stored(self, done: int) -> dict[str, torch.Tensor]:
        """What is drawn for steps from `done` on, for a checkpoint: branches [A, K, W] int32 by `step:step whose weights drew`. Every rank must ask."""
        return {f"{turn.share.step}:{turn.at}": gathered(turn) for turn in self.turns if turn.drawn is not None and turn.share.step >= done}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def gathered(turn: Turn) -> torch.Tensor:
    """Branches [A, K, W] of the whole step, by conversation and anchor, on every rank."""
    assert turn.drawn is not None
    kept = total(turn.share.kept()).tolist()
    tokens = [each.tokens.cpu().unflatten(1, (batch.anchors.position.shape[1], -1)) for each, batch in zip(turn.drawn, turn.batches, strict=True)]
    table = torch.zeros(sum(kept), *tokens[0].shape[2:], dtype=torch.long)
    for micro, row, here, there in turn.share.blocks(kept):
        table[there] = tokens[micro][row, here]
    return total(table).int()


def spread(share: Share, batches: list[Batch], table: torch.Tensor) -> list[torch.Tensor]:
    """The inverse of `gathered`, on any number of ranks: tokens [B, M, W] of every batch."""
    kept = total(share.kept()).tolist()
    if len(table) != sum(kept):
        raise ValueError(f"train: the checkpoint has branches at {len(table)} anchors of step {share.step + 1}, which has {sum(kept)}; delete it to go on from the one before")
    tokens = [torch.zeros(*batch.anchors.position.shape, *table.shape[1:], dtype=torch.long) for batch in batches]
    for micro, row, here, there in share.blocks(kept):
        tokens[micro][row, here] = table[there].long()
    return [each.flatten(1, 2).to(batch.texts.input_ids.device) for each, batch in zip(tokens, batches, strict=True)]
