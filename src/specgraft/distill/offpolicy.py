"""DSpark's off-policy objective on one batch: 0.1 CE + 0.9 L1 + 1.0 confidence BCE (DSpark eqs. 9 to 12).

Legend: B rows, T tokens, N anchors, G draft tokens, K taps, D hidden size, R supervised slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specgraft.config import DistillSection
from specgraft.distill.anchors import Anchors
from specgraft.drafters.dspark import DSpark
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import compound


@dataclass(frozen=True)
class Batch:
    """Padded conversations of one step, on the trainer's device. Filled by `train.batch`."""

    input_ids: torch.Tensor  # [B, T]
    lengths: torch.Tensor  # [B]
    taps: torch.Tensor  # [B, T, K, D]
    last: torch.Tensor  # [B, T, D]
    anchors: Anchors


@dataclass(frozen=True)
class Outcome:
    """Numerator, denominator and per-slot sums; micro-batches and ranks add up. Filled by `dspark_loss`."""

    numerator: torch.Tensor  # scalar with graph: sum of w m loss
    denominator: torch.Tensor  # scalar: sum of w m
    sums: dict[str, torch.Tensor]  # [G] sums over slots of ce, l1, alpha, hit, bce, and their `count`


def slot_weights(draft_tokens: int, decay: float) -> torch.Tensor:
    """w_j = exp(-(j-1)/decay), [G]."""
    return torch.exp(-torch.arange(draft_tokens, dtype=torch.float32) / decay)


def block_hidden(drafter: DSpark, shared: Shared, batch: Batch) -> torch.Tensor:
    """h [B,N,G,D] of every block of the batch; a block reads taps at positions < a only."""
    length = batch.input_ids.shape[1]
    steps = torch.arange(length, device=batch.input_ids.device)
    context = drafter.context(batch.taps, steps.expand(batch.input_ids.shape))
    anchors = batch.anchors.position
    visible = (steps < anchors[..., None]) & (steps < batch.lengths[:, None, None])
    states = shared.embed(batch.input_ids.gather(1, anchors))
    mask_state = shared.embed(torch.tensor(shared.mask_token_id, device=anchors.device))
    return drafter.block(states, mask_state, anchors, context, visible)


def dspark_loss(
    drafter: DSpark,
    shared: Shared,
    batch: Batch,
    options: DistillSection,
    compute: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Outcome:
    """The compound loss as numerator and denominator.

    `options.slot_sampling` keeps slot j with probability w_j and weight 1 (an unbiased estimate of both sums, which
    computes head rows for about half of the slots at decay 4, G 7). `compute` is the dtype of matrix products.
    """
    size = drafter.config.draft_tokens
    device = batch.input_ids.device
    with torch.autocast(device.type, dtype=compute, enabled=compute not in (torch.float32, torch.float64)):
        hidden = block_hidden(drafter, shared, batch)
    mask = batch.anchors.mask
    weights = slot_weights(size, options.decay).to(device)
    if options.slot_sampling:
        draw = torch.rand(mask.shape, generator=generator).to(device)
        mask = mask & (draw < weights)
        weights = torch.ones_like(weights)
    row, block, slot = mask.nonzero(as_tuple=True)
    if len(row) == 0:  # a rank without slots still takes part in the reduction
        zero = sum(parameter.sum() for parameter in drafter.parameters()) * 0.0
        return Outcome(zero, torch.zeros((), device=device), {})  # type: ignore[arg-type]
    anchor = batch.anchors.position[row, block]
    h = hidden[row, block, slot]
    label = batch.input_ids[row, anchor + slot + 1]
    embedded = drafter.embed_previous(batch.input_ids[row, anchor + slot])
    weight = weights[slot]
    with torch.no_grad():
        final = shared.final_norm(batch.last[row, anchor + slot])  # state of x_{a+j-1} gives p_j
    value, losses = compound(
        h, embedded, final, label, shared.head, drafter.markov_head.markov_w2.weight,
        options.ce * weight, options.l1 * weight, options.chunk_rows, compute, options.kl * weight,
    )  # fmt: skip
    logit = drafter.confidence(h, embedded)
    bce = F.binary_cross_entropy_with_logits(logit, losses.alpha.clamp(0, 1).to(logit.dtype), reduction="none")
    numerator = value + options.confidence * (weight * bce).sum()
    parts = {"ce": losses.ce, "l1": losses.l1, "kl": losses.kl, "alpha": losses.alpha, "hit": losses.hit, "bce": bce.detach()}
    parts["count"] = torch.ones_like(losses.ce)
    sums = {name: torch.zeros(size, device=device).index_add_(0, slot, part.float()) for name, part in parts.items()}
    return Outcome(numerator, weight.sum(), sums)
