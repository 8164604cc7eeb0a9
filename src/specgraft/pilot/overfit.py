"""One answer, learnt by heart, must then be accepted in full by draft -> verify.

It shares nothing with the loss: a label, mask or position that is off by one learns just as well and is refused here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from specgraft.capture.forward import capture_batch
from specgraft.check.overfit import whole_rounds
from specgraft.config import DistillSection, RunConfig
from specgraft.decode.loop import Request as DraftedRequest
from specgraft.decode.loop import decode
from specgraft.decode.pair import pair
from specgraft.distill.objective import objective
from specgraft.drafters.precision import at_precision
from specgraft.drafters.shared import Shared
from specgraft.log import progress
from specgraft.records import Conversation
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target
from specgraft.targets.model import Target
from specgraft.train.batch import collate, step_generator
from specgraft.train.optimizer import Optimizer
from specgraft.train.setup import mask_token, new_drafter


def overfit_sample(config: RunConfig, conversations: list[Conversation]) -> Conversation:
    """The first greedy answer of at least `check.overfit_tokens` tokens. Raises ValueError when there is none."""
    wanted = config.check.overfit_tokens
    for conversation in conversations:
        fits = len(conversation.input_ids) <= config.train.max_length
        one = not conversation.turns and conversation.answers == "target"
        if one and conversation.temperature == 0 and sum(conversation.loss_mask) >= wanted and fits:
            return conversation
    raise ValueError(
        f"no greedy answer of {wanted} tokens lies inside train.max_length={config.train.max_length}: lower "
        "check.overfit_tokens, or raise regen.greedy_share or train.max_length"
    )


def answer_again(target: Target, sample: Conversation) -> Conversation:
    """The prompt answered anew by this very target, greedily."""
    request = Request(sample.input_ids[: sample.prompt_length], sum(sample.loss_mask))
    generate(target, [request], 1)
    ids = request.ids + request.output
    mask = [place >= len(request.ids) for place in range(len(ids))]
    return dataclasses.replace(sample, input_ids=ids, loss_mask=mask, finish_reason=request.finish_reason)


def overfit(config: RunConfig, taps: list[int], conversations: list[Conversation]) -> float | None:
    """Trains a fresh drafter on one answer and returns the accept length of decoding it, last round left out.

    In float32: in half precision a near tie can take decoding off the answer, where nothing was learnt.
    """
    own = config.target
    target = load_target(own.id, "float32", config.run.device, own.remote_code)
    sample = answer_again(target, overfit_sample(config, conversations))
    features = capture_batch(target, [sample], taps)
    part = config.train.model_copy(
        update={"steps": config.check.overfit_steps, "warmup": 0.1, "min_lr_ratio": 0.1, "lr": 1e-3, "optimizer": "adamw"}
    )
    # cross-entropy alone: the answer's own tokens, as fast as possible
    preset: Any = "dflash2" if config.drafters.kind == "dflash2" else "dflash"
    options = DistillSection(preset=preset, decay=100.0, chunk_rows=config.distill.chunk_rows)
    drafter = new_drafter(config, target, taps, conversations)
    shared = Shared.of(target, mask_token(config, target))
    optimizer = Optimizer(drafter, part)
    compute = getattr(torch, part.compute)
    size = config.drafters.draft_tokens
    learnt = 0
    with progress("overfit", part.steps) as bar:
        for step in range(part.steps):
            generator = step_generator(config.run.seed, step, "anchors")
            batch = collate(features, 64, size, part.max_length, generator, target.device)
            outcome = objective(drafter, shared, batch, options, compute)
            outcome.loss.backward()
            optimizer.step(step)
            ce = float(outcome.sums["ce"].sum() / outcome.sums["count"].sum())
            bar.at(step + 1, f"cross-entropy {ce:.3f}")
            learnt = learnt + 1 if ce < 0.01 else 0
            if learnt >= 3:
                break
    both = pair(target, at_precision(drafter.requires_grad_(False).eval(), target.dtype))
    request = DraftedRequest(sample.input_ids[: sample.prompt_length], sum(sample.loss_mask))
    decode(both, [request], 1)
    return whole_rounds(request.rounds)
