"""`train`: Features -> a drafter. One process; every step depends on the seed and its number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specgraft.config import DistillSection, RunConfig
from specgraft.distill.batch import Batch
from specgraft.distill.fusing import settle
from specgraft.distill.objective import Outcome, objective
from specgraft.distill.onpolicy import onpolicy
from specgraft.distill.statistics import slot_statistics
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.log import Bar, Metrics, progress, say
from specgraft.records import Conversation, ids_digest
from specgraft.run_dir import RunDir
from specgraft.stream.memory import MemoryStream
from specgraft.stream.shards import ShardReader
from specgraft.stream.source import Open, Source
from specgraft.targets.model import Target
from specgraft.train.batch import collate, step_batches, step_generator
from specgraft.train.checkpoint import checkpoints, restore, save
from specgraft.train.optimizer import Optimizer, learning_rate
from specgraft.train.setup import mask_token, new_drafter
from specgraft.train.validate import survival

if TYPE_CHECKING:
    from specgraft.targets.scoring import Scorer

Step = Callable[[Batch, int], Outcome]  # a batch and its step, counted from 0


def train_settings(config: RunConfig, source: Source, taps: Sequence[int]) -> dict[str, Any]:
    """What the weights depend on; a checkpoint of other settings is refused."""
    loop = {"checkpoint_every", "keep", "validate_every", "validate_rows"}
    found: dict[str, Any] = {"run.seed": config.run.seed}
    for section, skip in (("drafters", set()), ("distill", set()), ("train", loop)):
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
) -> None:
    """Trains until `train.steps`, going on from the newest checkpoint. Raises ValueError, in one line, for what stops it.

    `score` gives the target's states on branches (`distill.slots`); None: `target` does, in this process.
    `opened` gives the features of a split (`stream.source`); None: the shards of the run.
    """
    part = config.train
    splits = {
        split: {c.prompt_id: ids_digest(c.input_ids) for c in conversations if c.split == split} for split in ("train", "heldout")
    }
    opened = opened or (lambda split, keep: ShardReader(run.features, split, header, keep, config.stream.bad_rows))
    source, held_out = opened("train", splits["train"]), opened("heldout", splits["heldout"])
    refuse_nothing_to_learn(part.max_length, [c for c in conversations if c.split == "train"], 1 if config.distill.origin == "branches" else 2)
    found = checkpoints(run.checkpoints)
    drafter = new_drafter(config, target, header["taps"], conversations, start=not found)
    shared = Shared.of(target, mask_token(config, target))
    optimizer = Optimizer(drafter, part)
    settings = train_settings(config, source, header["taps"])
    options = settle(config.distill, target.device, part.steps)
    first = restore(found[-1], drafter, optimizer, settings) if found else 0
    if first >= part.steps:
        return
    metrics = Metrics(run.metrics, first or -1)  # from the start: none of an earlier try's rows, step 0 included
    batches = step_batches(
        source, part.rows, part.anchors, config.drafters.draft_tokens, part.max_length, config.run.seed, first, part.steps, target.device,
        part.row_tokens if part.packing == "rows" else 0, target.end_ids if options.origin == "branches" else None,
    )  # fmt: skip
    learn = learner(config, options, target, drafter, shared, score)
    with progress("train", part.steps) as bar, MemoryStream(batches, bound=2) as stream:
        bar.at(first)
        if first == 0 and options.origin != "references":  # what the drafter was before: the report shows both
            report_validation(config, drafter, shared, held_out, metrics, 0, bar)
        for step, batch in enumerate(stream, first):
            began = time.monotonic()
            outcome = learn(batch, step)
            outcome.loss.backward()
            norm = optimizer.step(step)
            seconds = time.monotonic() - began
            row = summary(outcome, seconds)
            if not math.isfinite(row["loss"]) or not math.isfinite(norm):
                raise ValueError(f"train: step {step + 1} has loss {row['loss']} and gradient norm {norm}: lower train.lr, or start from a drafter that is nearer to the target")
            done = step + 1
            metrics.add(kind="train", step=done, lr=learning_rate(step, part), grad_norm=norm, seconds=seconds, **row)
            last = done == part.steps
            if done % part.checkpoint_every == 0 or last:
                save(run.checkpoints, done, drafter, optimizer, settings, part.keep)
            if done % part.validate_every == 0 or last:
                report_validation(config, drafter, shared, held_out, metrics, done, bar)
            bar.at(done, f"loss {row['loss']:.3f}")


def learner(
    config: RunConfig, options: DistillSection, target: Target, drafter: Drafter, shared: Shared, score: Scorer | None
) -> Step:
    """What a step minimises, by `distill.slots`; its random numbers belong to the step."""
    seed, compute = config.run.seed, getattr(torch, config.train.compute)
    if options.origin == "branches":
        if score is None:
            from specgraft.targets.scoring import scorer

            score = scorer(target)
        ask = score
        return lambda batch, step: onpolicy(
            drafter, shared, batch, options, ask, target.end_ids, compute, step_generator(seed, step, "branches")
        )
    if options.origin == "rollouts":
        from specgraft.distill.draft_opd import draft_opd, pair

        both = pair(target, drafter)
        return lambda batch, step: draft_opd(both, batch, options, compute, step_generator(seed, step, "rollouts"), target.end_ids)
    return lambda batch, step: objective(drafter, shared, batch, options, compute, step_generator(seed, step, "slots"))


def refuse_nothing_to_learn(max_length: int, conversations: Sequence[Conversation], least: int = 2) -> None:
    """Counts the rows without an anchor (`least` tokens of the answer inside `max_length`). Raises ValueError when none has one."""
    empty = sum(min(len(c.input_ids), max_length) < c.prompt_length + least for c in conversations)
    tokens = "two tokens" if least == 2 else "a token"
    if empty == len(conversations):
        raise ValueError(f"train.max_length={max_length}: no answer has {tokens} inside it, there is nothing to learn; raise it")
    if empty:
        fewer = "fewer than two tokens" if least == 2 else "no token"
        say(f"train: {empty} of {len(conversations)} answers have {fewer} inside train.max_length={max_length}")


BY_SLOT = ("alpha", "hit", "recall", "mass", "oracle", "path")  # one plus the sum of `oracle` or `path` is an accept length


def summary(outcome: Outcome, seconds: float = 0.0) -> dict[str, Any]:
    """Means of a step for the metrics file: the loss, every loss that was computed; per slot what acceptance is made of.

    `seconds` of the step: what its parts do not account for is backward and update, and goes to `learn`.
    """
    row: dict[str, Any] = {"loss": float(outcome.loss.detach())}
    for name, part in outcome.seconds.items():
        row[f"{name}_seconds"] = part + (seconds - sum(outcome.seconds.values()) if name == "learn" else 0.0)
    sums = outcome.sums
    total = float(sums["count"].sum())
    if not total:  # no mean of nothing
        return row | {"slots": 0}
    count = sums["count"].clamp(min=1)
    for name, values in sums.items():
        if name in BY_SLOT:
            row[name] = (values / count).tolist()
        elif name == "accepted":  # branches accepted up to each slot: every one has a first slot
            row[name] = (values / count[0]).tolist()
            row["branch_accept_length"] = 1 + sum(row[name])
        elif name == "selector":  # slots whose label is no candidate are no part of this mean
            row[name] = float(values.sum()) / max(1.0, float(sums["taught"].sum()))
        elif name not in ("count", "taught"):
            row["confidence" if name == "bce" else name] = float(values.sum()) / total
    row["slots"] = int(total)
    return row


def report_validation(
    config: RunConfig, drafter: Drafter, shared: Shared, source: Source, metrics: Metrics, step: int, bar: Bar
) -> None:
    """Adds a `validate` row: survival of greedy hits on held-out answers (greedy text), anchors drawn uniformly."""
    part = config.train
    rows = [row for row in source.rows(range(min(part.validate_rows, len(source.ids)))) if row is not None]
    count = len(rows)
    values, masks = [], []
    for start in range(0, count, part.rows):
        generator = step_generator(config.run.seed, start, "anchors")
        batch = collate(
            rows[start : start + part.rows], part.anchors, config.drafters.draft_tokens, part.max_length, generator, shared.head.device
        )
        alpha, hit = slot_statistics(drafter, shared, batch, getattr(torch, part.compute), config.distill.chunk_rows)
        size = config.drafters.draft_tokens
        values.append(torch.stack([alpha.flatten(0, 1), hit.flatten(0, 1)]).view(2, 1, -1, size))
        masks.append(batch.anchors.mask.view(1, -1, size))
    mask = torch.cat(masks, 1)
    alpha_survival, hit_survival = (survival(torch.cat([v[kind] for v in values], 1), mask) for kind in (0, 1))
    whose = "target" if config.regen.answers == "target" else "data set"  # figures of the two are not to be compared
    metrics.add(
        kind="validate", step=step, answers=whose, survival=hit_survival, accept_length=1 + sum(hit_survival),
        alpha_survival=alpha_survival, alpha_accept_length=1 + sum(alpha_survival),
    )  # fmt: skip
    bar.at(step, f"accept length {1 + sum(hit_survival):.2f} (teacher-forced; answers: {whose})")
