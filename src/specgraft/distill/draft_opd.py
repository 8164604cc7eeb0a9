"""Draft-OPD: the drafter learns from the rounds of its own draft-verify decoding (arXiv 2605.29343; algorithms.md 3.9).

Committed tokens: forward KL from the target. Refused drafts, on the prefix that was drafted: reverse KL. Gradients flow
through the laws alone; tokens are constants. For a selector's drafter the law is the unary one, whose task is that the
candidates are there: the selector's own law is zero outside them, where both divergences are infinite.
Legend: M rounds, G draft tokens, D hidden size, R rows of the losses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional as F

from specgraft.config import DistillSection
from specgraft.decode.loop import Timing, clock
from specgraft.decode.pair import Pair
from specgraft.decode.pair import pair as pair  # `train` makes one
from specgraft.distill.batch import Batch, Slots, supervised
from specgraft.distill.objective import Outcome
from specgraft.distill.parts import Inputs, by_slot, slot_inputs
from specgraft.distill.ranks import LEAST, over_step, touched, world
from specgraft.distill.rollouts import Rollouts, roll_out, streams
from specgraft.distill.weights import decay_weights
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.naive import SlotLosses

# of the published single-token estimators
LEAST_LOG = -10.0  # log-probabilities in the Bernoulli term are no less
MOST_GAP = 20.0  # log p - log q in k3 lies in -20 .. 20
MOST = 10.0  # a token adds no more


def draft_opd(
    both: Pair,
    batch: Batch,
    options: DistillSection,
    compute: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    end_ids: Collection[int] | None = None,
    known: Mapping[str, torch.Tensor] | None = None,
    rolled: Rollouts | None = None,
    *,
    limit: int = 0,
) -> Outcome:
    """The loss of one batch: its prompts are decoded with the drafter as it is, then every round is learnt from.

    An answer is decoded as far as its reference, or `limit` > 0 tokens. Nothing is drawn, so `generator` is not used;
    `end_ids` (default: the target's) bound what drafts are learnt from. `compute`: dtype of the drafter's products.
    `seconds`: score (the target: prefill and verify passes, on a CPU), sample (the rest of decoding), learn (replay; backward is the caller's).
    `known` as in `objective.learn`; `rolled`: the rounds, where they have been decoded already (`counting`).
    Raises ValueError for another loss in the mix than the confidence, and as `roll_out`.
    """
    drafter = both.drafter
    options.check_origin(drafter.config.kind)
    seconds = dict.fromkeys(("sample", "score"), 0.0)
    if rolled is None and not without_answer(batch):
        rolled, seconds = timed_rounds(both, batch, compute, limit)
    began = clock()
    if rolled is None:
        outcome = nothing(drafter, options, batch.last.device, known)
    else:
        outcome = replay(drafter, both.shared, rolled, options, compute, both.target.end_ids if end_ids is None else end_ids, known)
    return replace(outcome, seconds={**seconds, "learn": clock() - began})


def without_answer(batch: Batch) -> bool:
    """Every answer was cut away: a step without slots."""
    return batch.loss_mask is not None and not bool(batch.loss_mask.any())


def timed_rounds(both: Pair, batch: Batch, compute: torch.dtype, limit: int = 0) -> tuple[Rollouts, dict[str, float]]:
    """The rounds of the batch, and the seconds of their parts."""
    began, timing = clock(), Timing()
    timed = both.target.device.type == "cpu"  # elsewhere the parts are told apart by waiting for each, which costs time
    rolled = roll_out(both, batch, timing if timed else None, limit, compute)
    score = timing.prefill + timing.verify
    return rolled, {"sample": clock() - began - score, "score": score}


def confident(drafter: Drafter, options: DistillSection) -> bool:
    return drafter.confidence_head is not None and "confidence" in options.weights(drafter.config.kind)


def nothing(
    drafter: Drafter, options: DistillSection, device: torch.device, known: Mapping[str, torch.Tensor] | None
) -> Outcome:
    """A part of a step that has no round: zero, with a graph, and what it owes to the sums over ranks."""
    zero = torch.zeros((), device=device)
    denominators = named(over_step({"rounds": zero, "confidence": zero}, known), confident(drafter, options))
    sums = {"count": torch.zeros(drafter.config.draft_tokens, device=device)}
    return Outcome(touched(drafter) * world(), dict.fromkeys(denominators, zero), denominators, sums)


def named(found: Mapping[str, torch.Tensor], sure: bool) -> dict[str, torch.Tensor]:
    """Denominators by part: both streams share one."""
    return {"response": found["rounds"], "rejected": found["rounds"]} | ({"confidence": found["confidence"]} if sure else {})


def weights_of(found: Streams, options: DistillSection, draft_tokens: int) -> torch.Tensor:
    """[R] what each row counts for in the confidence."""
    decay = decay_weights(draft_tokens, options.decay).to(found.once.dtype).to(found.once.device)
    return decay[found.slots.slot] * found.once


def round_denominators(found: Streams, sure: torch.Tensor) -> dict[str, torch.Tensor]:
    """This part's own: rows of both streams, and the weights sure [R] of the confidence."""
    return {"rounds": found.response.sum() + found.rejected.sum(), "confidence": sure.sum()}


@dataclass(frozen=True)
class Streams:
    """Rows of the losses and what each counts for. Filled by `rows_of`."""

    slots: Slots
    response: torch.Tensor  # [R] 1 for a committed token
    rejected: torch.Tensor  # [R] weight of a refused draft: 0 or lambda * decay**(j-1)
    once: torch.Tensor  # [R] 0 where another row has the same slot


def rows_of(rolled: Rollouts, options: DistillSection, end_ids: Collection[int], kind: torch.dtype) -> Streams:
    """The slot of the first refusal is in both streams, behind the same tokens: one row, unless the token itself counts."""
    response, rejected = streams(rolled.accepted, rolled.committed, rolled.tokens[:, 1:], end_ids)
    if options.rollout_rejected == 0:
        rejected = torch.zeros_like(rejected)
    decay = options.rollout_rejected * options.rollout_decay ** torch.arange(response.shape[1], device=response.device, dtype=kind)
    if options.rollout_estimator == "full":
        slots = supervised(rolled.blocks(response | rejected))
        at = (slots.block, slots.slot)
        committed, refused = response[at].to(kind), rejected[at].to(kind)
        return Streams(slots, committed, refused * decay[slots.slot], torch.ones_like(committed))
    left, right = supervised(rolled.blocks(response)), supervised(rolled.blocks(rejected))
    left = replace(left, label=rolled.text_tokens()[left.block, left.slot])
    right = replace(right, source=right.source + len(left.places))
    names = ("row", "block", "slot", "label", "places", "before", "source")
    slots = Slots(*(torch.cat([getattr(left, name), getattr(right, name)]) for name in names))
    first = torch.arange(len(slots), device=response.device) < len(left)
    return Streams(
        slots, first.to(kind), torch.where(first, 0.0, decay[slots.slot]), (first | ~response[slots.block, slots.slot]).to(kind)
    )


def replay(
    drafter: Drafter, shared: Shared, rolled: Rollouts, options: DistillSection, compute: torch.dtype, end_ids: Collection[int],
    known: Mapping[str, torch.Tensor] | None = None,
) -> Outcome:  # fmt: skip
    """The loss of recorded rounds: one forward of the drafter over the final texts, with a block at every round's anchor."""
    kind = torch.promote_types(drafter.fc.weight.dtype, torch.float32)
    found = rows_of(rolled, options, end_ids, kind)
    slots, size, learns_trust = found.slots, drafter.config.draft_tokens, confident(drafter, options)
    sure = weights_of(found, options, size)
    step = over_step(round_denominators(found, sure), known)
    pooled, steady, denominators = step["rounds"], step["confidence"], named(step, learns_trust)
    numerators = {name: torch.zeros_like(pooled) for name in denominators}
    value, sums = torch.zeros_like(pooled), {"count": torch.zeros(size, device=pooled.device)}
    if len(slots):
        half = compute not in (torch.float32, torch.float64)
        texts = rolled.texts if half else replace(rolled.texts, taps=rolled.texts.taps.to(drafter.fc.weight.dtype))
        with torch.autocast(pooled.device.type, dtype=compute, enabled=half):
            hidden = drafter(shared, texts, rolled.anchors[None])
        inputs = slot_inputs(drafter, shared, rolled.blocks(torch.ones_like(rolled.tokens[:, 1:], dtype=torch.bool)), hidden, slots)
        value, each, losses = divergences(drafter, shared, inputs, found, pooled + LEAST, options, compute, learns_trust)
        numerators |= {name: part.sum() for name, part in each.items()}
        sums = told(losses, found, rolled, size)
        if learns_trust:
            assert drafter.confidence_head is not None and losses.alpha is not None
            scale, logit = options.weights(drafter.config.kind)["confidence"], drafter.confidence_head(inputs.rows.hidden, inputs.embedded)
            bce = F.binary_cross_entropy_with_logits(logit, losses.alpha.clamp(0, 1).to(logit.dtype), reduction="none")
            value = value + scale * (sure * bce).sum() / (steady + LEAST)
            numerators["confidence"] = scale * (sure * bce.detach()).sum()
            sums["bce"] = by_slot(found.once * bce.detach(), slots.slot, size)
    if not len(slots) or world() > 1:
        value = value + touched(drafter)
    return Outcome(value * world(), numerators, denominators, sums)


def divergences(
    drafter: Drafter,
    shared: Shared,
    inputs: Inputs,
    found: Streams,
    denominator: torch.Tensor,
    options: DistillSection,
    compute: torch.dtype,
    learns_trust: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], SlotLosses]:
    """Both streams over their denominator, with graph; what each row adds to its stream [R]; the losses of every row."""
    rows, fused = inputs.rows, options.fused == "on"
    run = partial(weighted_losses, head=shared.head_as(compute), markov=inputs.markov, chunk=options.chunk_rows, compute=compute, fused=fused)
    wanted = {"alpha", "hit"} if drafter.selector is None or learns_trust else set()
    if options.rollout_estimator == "full":
        weights = {"kl": found.response / denominator, "rkl": found.rejected / denominator}
        value, losses, _ = run(rows, weights=weights, want=wanted)
        assert losses.kl is not None and losses.rkl is not None
        return value, {"response": found.response * losses.kl, "rejected": found.rejected * losses.rkl}, losses
    with torch.no_grad():
        _, losses, _ = run(rows, weights={}, want=wanted | {"target_ce"})
    assert losses.target_ce is not None
    values, slopes = single_token(-losses.ce, -losses.target_ce, found.response > 0)
    weight = found.response + found.rejected
    alone = replace(rows, target_hidden=None, source=None)
    step, _, _ = run(alone, weights={"ce": -slopes * weight / denominator})
    value = step + ((weight * values).sum() / denominator - step).detach()  # steps along the slopes, shows the values
    return value, {"response": found.response * values, "rejected": found.rejected * values}, losses


def single_token(log_q: torch.Tensor, log_p: torch.Tensor, response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The published code's estimators [R] from the log-probabilities of one token a row, and their slopes in log q.

    response [R]: KL of the two Bernoulli laws that the token is this one or another. Elsewhere k3, p/q - 1 - log(p/q),
    whose mean over d ~ q is KL(q||p), but whose mean slope is that of KL(p||q).
    """
    with torch.enable_grad():
        leaf = log_q.detach().requires_grad_()
        most = math.log1p(-torch.finfo(log_q.dtype).eps)
        s, t = leaf.clamp(LEAST_LOG, most), log_p.clamp(LEAST_LOG, most)
        others = (1 - t.exp()) * (torch.log1p(-t.exp()) - torch.log1p(-s.exp()))
        gap = (log_p - leaf).clamp(-MOST_GAP, MOST_GAP)
        values = torch.where(response, t.exp() * (t - s) + others, gap.exp() - 1 - gap).clamp(max=MOST)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes


def told(losses: SlotLosses, found: Streams, rolled: Rollouts, size: int) -> dict[str, torch.Tensor]:
    """Sums [G] over the slots, each counted once: the divergences, the overlap, and how many were accepted in their round."""
    slots = found.slots
    kept = {name: value for name in ("kl", "rkl", "alpha", "hit") if (value := getattr(losses, name)) is not None}
    kept["accepted"] = slots.slot < rolled.accepted[slots.block]
    kept["count"] = torch.ones_like(found.once)
    return {name: by_slot(found.once * value, slots.slot, size) for name, value in kept.items()}
