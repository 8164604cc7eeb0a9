"""`train`: Features -> a drafter. One process or the ranks of torchrun; every step depends on the seed and its number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specgraft.config import DistillSection, RunConfig
from specgraft.distill.batch import Batch
from specgraft.distill.fusing import settle
from specgraft.distill.ranks import total
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.log import Bar, Metrics, progress, say
from specgraft.records import Conversation, ids_digest
from specgraft.run_dir import RunDir
from specgraft.stream.folder_lock import alone
from specgraft.stream.memory import MemoryStream
from specgraft.stream.shards import ShardReader
from specgraft.stream.source import Open, Source
from specgraft.targets.model import Target
from specgraft.train.ahead import Ahead
from specgraft.train.batch import step_shares
from specgraft.train.checkpoint import Saved, checkpoints, decoded, read, save
from specgraft.train.decoding import forget, measured, remember
from specgraft.train.device import Activity
from specgraft.train.micro import both, gradients
from specgraft.train.optimizer import Optimizer, learning_rate
from specgraft.train.parallel.group import Group, Refused
from specgraft.train.parallel.module import Stepper
from specgraft.train.parallel.stop import Stop, Stopped
from specgraft.train.setup import mask_token, new_drafter
from specgraft.train.shares import Share, stand_in
from specgraft.train.tasks import task_of
from specgraft.train.told import pace, summary
from specgraft.train.validate import validation

if TYPE_CHECKING:
    from specgraft.targets.scoring import Scorer

LOCK = ".train.lock"  # in the run's folder: two that train there would delete each other's checkpoints
# what changes no weight, but for the order of sums
LOOP = {
    "checkpoint_every", "keep", "validate_every", "validate_rows", "accumulate", "parallel", "timeout", "checkpoint_activations", "compile",
    "decode_prompts", "tensorboard",
}  # fmt: skip


def train_settings(config: RunConfig, source: Source, taps: Sequence[int]) -> dict[str, Any]:
    """What the weights depend on; a checkpoint of other settings is refused."""
    found: dict[str, Any] = {"run.seed": config.run.seed}
    for section, skip in (("drafters", set()), ("distill", set()), ("train", LOOP)):
        values = getattr(config, section).model_dump(mode="json")
        found |= {f"{section}.{key}": value for key, value in values.items() if key not in skip}
    part = config.stream  # what it says of media and producers changes no weight
    found |= {f"stream.{key}": value for key, value, plain in (("group", part.group, 1), ("staleness", part.staleness, 0)) if value != plain}
    found["features"] = {"tokens": sum(source.lengths), "taps": list(taps), "digest": source.digest()}
    return found


def train(
    config: RunConfig,
    run: RunDir,
    target: Target,
    header: dict[str, Any],
    conversations: Sequence[Conversation],
    score: Scorer | None = None,
    opened: Open | None = None,
    group: Group | None = None,
) -> None:
    """Trains until `train.steps`, going on from the newest checkpoint. Raises ValueError, in one line, for what stops it.

    `score` gives the target's states on branches (`distill.slots`); None: `target` does, in this process.
    `opened` gives the features of a split (`stream.source`); None: the shards of the run.
    `group`: the ranks that train together, each of which calls this; None: this process is alone.
    Raises Stopped (an exit with code 0) behind a step in which SIGTERM came, when that is saved.
    """
    group = group or Group()
    with Stop() as stop, ExitStack() as held:
        group.lead(lambda: held.enter_context(alone(run.root / LOCK)))
        begun = group.alike(lambda: begin(config, run, target, header, conversations, opened))
        if begun.saved is None or begun.saved.step < config.train.steps:
            Loop(config, run, target, begun, score, group, stop).run()


@dataclass(frozen=True)
class Begun:
    """What training starts from, as this rank sees it. Filled by `begin`."""

    drafter: Drafter
    shared: Shared
    source: Source
    held_out: Source
    conversations: Sequence[Conversation]
    settings: dict[str, Any]
    options: DistillSection
    saved: Saved | None  # the checkpoint to go on from


def begin(
    config: RunConfig, run: RunDir, target: Target, header: dict[str, Any], conversations: Sequence[Conversation], opened: Open | None
) -> Begun:
    """Everything that can be refused before ranks work together."""
    part = config.train
    if part.decode_prompts and not hasattr(target, "forward"):
        raise ValueError("train.decode_prompts decodes with the target in this process, and it is elsewhere: set it to 0, and evaluate")
    splits = {
        split: {c.prompt_id: ids_digest(c.input_ids) for c in conversations if c.split == split} for split in ("train", "heldout")
    }
    opened = opened or (lambda split, keep: ShardReader(run.features, split, header, keep, config.stream.bad_rows))
    source, held_out = opened("train", splits["train"]), opened("heldout", splits["heldout"])
    refuse_nothing_to_learn(part.max_length, [c for c in conversations if c.split == "train"], 1 if config.distill.origin == "branches" else 2)
    found = checkpoints(run.checkpoints)
    drafter = new_drafter(config, target, header["taps"], conversations, start=not found)
    shared = Shared.of(target, mask_token(config, target))
    settings = train_settings(config, source, header["taps"])
    options = settle(config.distill, target.device, part.steps)
    saved = read(found[-1], drafter.config, settings) if found else None
    return Begun(drafter, shared, source, held_out, conversations, settings, options, saved)


class Loop:
    """Steps, checkpoints and what is measured on the way, on one rank."""

    def __init__(
        self, config: RunConfig, run: RunDir, target: Target, begun: Begun, score: Scorer | None, group: Group, stop: Stop
    ) -> None:
        self.config, self.run_dir, self.target, self.begun, self.group, self.stop = config, run, target, begun, group, stop
        self.drafter, self.device = begun.drafter, target.device
        self.stepper = Stepper(begun.drafter, config.train, group)
        self.optimizer = Optimizer(begun.drafter, config.train)
        self.task = task_of(config, begun.options, target, begun.drafter, begun.shared, score)
        self.first = 0 if begun.saved is None else begun.saved.put(self.drafter, self.optimizer)
        self.saved = self.first
        self.held = [c for c in begun.conversations if c.split == "heldout"]
        self.metrics: Metrics | None = None
        self.bar: Bar | None = None

    def open_metrics(self) -> None:
        """From the start: none of an earlier try's rows, step 0 included."""
        board = self.run_dir.board if self.config.train.tensorboard else None
        self.metrics = Metrics(self.run_dir.metrics, self.first or -1, board)
        forget(self.run_dir, self.first)

    def tell(self, **row: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(**row)

    def run(self) -> None:
        part, origin = self.config.train, self.begun.options.origin
        self.group.lead(self.open_metrics)
        shares = step_shares(
            self.begun.source, part.rows, part.anchors, self.config.drafters.draft_tokens, part.max_length, self.config.run.seed,
            self.first, part.steps, self.device if part.accumulate == 1 else torch.device("cpu"),
            part.row_tokens if part.packing == "rows" else 0, self.target.end_ids if origin == "branches" else None,
            part.accumulate, self.group.rank, self.group.size,
        )  # fmt: skip
        with progress("train", part.steps) as self.bar, MemoryStream(shares, bound=2) as stream:
            self.bar.at(self.first)
            if self.first == 0 and origin != "references":  # what the drafter was before: the report shows both
                self.validate(0)
            if part.decode_prompts and self.first and self.group.alike(lambda: self.first not in decoded(self.run_dir.checkpoints)):
                self.decode(self.first)  # it was stopped between the two
            kept = {} if self.begun.saved is None else self.begun.saved.ahead
            lag = self.config.stream.staleness
            with Ahead(
                lag, self.first, part.steps, iter(stream), self.batches, self.task, self.stepper, self.group, self.device, kept
            ) as ahead:
                for step in range(self.first, part.steps):
                    self.step(step, ahead)

    def step(self, step: int, ahead: Ahead) -> None:
        part, done = self.config.train, step + 1
        began, activity = time.monotonic(), Activity(self.device)
        with self.saving(step, ahead):
            turn = ahead.take(step)
            outcome = gradients(self.stepper, self.task, turn.batches, step, self.device, turn.drawn)
        norm = self.optimizer.step(step)
        waited, sampled = ahead.spent()
        seconds = time.monotonic() - began - waited
        if turn.drawn is not None:
            outcome = replace(outcome, seconds=both(outcome.seconds, {"sample": sampled}))
        row = summary(outcome, seconds) | activity.told()
        if not math.isfinite(row["loss"]) or not math.isfinite(norm):
            self.group.alike(lambda: refuse_infinite(done, row["loss"], norm))
        row |= pace(sum(turn.share.lengths), seconds, waited, self.device, step - turn.at) | self.begun.source.facts()
        self.tell(kind="train", step=done, lr=learning_rate(step, part), grad_norm=norm, seconds=seconds, **row)
        last, stopped = done == part.steps, self.group.any(self.stop.asked)
        if done % part.validate_every == 0 or last:  # before it is saved: a run that goes on from there has the row
            with self.saving(done, ahead):
                self.validate(done)
        if done % part.checkpoint_every == 0 or last or stopped:
            self.save(done, ahead)
            if part.decode_prompts and not stopped:
                self.decode(done)
        if self.bar is not None:
            self.bar.at(done, f"loss {row['loss']:.3f}")
        if stopped and not last:
            say(f"train: stopped behind step {done}, which is saved; the same command goes on from here")
            raise Stopped

    @contextmanager
    def saving(self, done: int, ahead: Ahead) -> Iterator[None]:
        """Where no more rows or scores come, what was learnt in `done` steps is not lost."""
        try:
            yield
        except ValueError as error:
            if done > self.saved and (self.group.size == 1 or isinstance(error, Refused)):  # Refused: on all ranks
                self.save(done, ahead)
            raise

    def batches(self, share: Share) -> list[Batch]:
        """The micro-batches of this rank, as many as every rank has."""
        options, found = self.begun.options, [None if micro is None else micro.batch for micro in share.micros]
        many = self.group.size > 1 or len(found) > 1
        if many and (options.slot_sampling or options.origin == "branches"):  # what is drawn hangs on the whole step's anchors
            found = share.placed(total(share.kept()).tolist())
        return [stand_in(self.drafter.config, self.target.dtype, self.device) if batch is None else batch for batch in found]

    def save(self, done: int, ahead: Ahead) -> None:
        self.stepper.rest()
        part, settings, drawn = self.config.train, self.begun.settings, ahead.stored(done)
        save(self.run_dir.checkpoints, done, self.drafter, self.optimizer, settings, part.keep, drawn, self.group, self.stepper.sharded)
        self.saved = done

    def validate(self, done: int) -> None:
        found = validation(self.config, self.drafter, self.begun.shared, self.begun.held_out, self.stepper, self.group)
        self.tell(kind="validate", step=done, **found)
        if self.bar is not None:
            self.bar.at(done, f"accept length {found['accept_length']:.2f} (teacher-forced; answers: {found['answers']})")

    def decode(self, done: int) -> None:
        began = time.monotonic()
        found = measured(self.config, self.target, self.drafter, self.held, self.group, self.stepper.sharded)
        self.group.lead(lambda: remember(self.run_dir, done, found))
        self.tell(kind="decode", step=done, **found, seconds=time.monotonic() - began)


def refuse_infinite(done: int, loss: float, norm: float) -> None:
    raise ValueError(f"train: step {done} has loss {loss} and gradient norm {norm}: lower train.lr, or start from a drafter that is nearer to the target")


def refuse_nothing_to_learn(max_length: int, conversations: Sequence[Conversation], least: int = 2) -> None:
    """Counts the rows without an anchor (`least` tokens of the answer inside `max_length`). Raises ValueError when none has one."""
    empty = sum(min(len(c.input_ids), max_length) < c.prompt_length + least for c in conversations)
    tokens = "two tokens" if least == 2 else "a token"
    if empty == len(conversations):
        raise ValueError(f"train.max_length={max_length}: no answer has {tokens} inside it, there is nothing to learn; raise it")
    if empty:
        fewer = "fewer than two tokens" if least == 2 else "no token"
        say(f"train: {empty} of {len(conversations)} answers have {fewer} inside train.max_length={max_length}")
