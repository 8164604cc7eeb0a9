"""The denominators of a part of a step, before any backward: only the sum over all parts may divide.

A step that is accumulated from micro-batches has one denominator a loss, of all of them, and a gradient is made of one
micro-batch at a time. Most denominators are counts of slots and blocks, known from the masks; those of D-PACE and of the
selector's cross-entropy hang on what the drafter says, and cost one more pass of it, without a graph. What is drawn for the
count (branches, rounds) is kept: the step learns from the very same.
Legend: B rows, M branches, G draft tokens, W nodes a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from specgraft.config import DistillSection
from specgraft.decode.pair import Pair
from specgraft.distill.batch import Batch, Blocks, supervised
from specgraft.distill.branches import Drawn, branch_mask
from specgraft.distill.draft_opd import round_denominators, rows_of, timed_rounds, weights_of, without_answer
from specgraft.distill.objective import forward, taught_blocks
from specgraft.distill.onpolicy import Clock, draw, slot_weights
from specgraft.distill.parts import block_parts, slot_inputs
from specgraft.distill.rollouts import Rollouts
from specgraft.distill.selector import OVERLAP, by_law, candidates_of
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses


@dataclass(frozen=True)
class Counted:
    """What is settled of a micro-batch before the first backward of its step. Filled by `count_references` and its like."""

    denominators: dict[str, torch.Tensor] | None  # by part, this micro-batch's own; None: they are summed on the way
    drawn: Drawn | None = None  # branches
    rolled: Rollouts | None = None  # rounds that were decoded
    seconds: dict[str, float] = field(default_factory=dict)  # by what was done


@torch.no_grad()
def count_references(
    drafter: Drafter, shared: Shared, batch: Batch, options: DistillSection, compute: torch.dtype, generator: torch.Generator | None
) -> Counted:
    """For `objective` with the same arguments."""
    blocks, decay = taught_blocks(batch, drafter.config.draft_tokens, options, generator)
    unary, chosen = by_law(drafter, options.weights(drafter.config.kind))
    found = of_masks(blocks.mask, decay, {*unary, *chosen})
    if "dpace" in unary or "selector" in chosen:
        found |= of_laws(drafter, shared, blocks, lambda: forward(drafter, shared, batch, compute), decay, options, compute)
    return Counted(found)


def of_masks(mask: torch.Tensor, decay: torch.Tensor, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Denominators that the slots' mask [B,N,G] and weights decay [G] give."""
    weights = decay[mask.nonzero()[:, 2]].sum()
    found = {"slots": weights}
    if set(OVERLAP) & set(names):
        found["overlap"] = weights
    if "e2e_tv" in names:
        found["e2e_tv"] = mask.any(-1).sum().to(weights.dtype)
    return found


def of_laws(
    drafter: Drafter, shared: Shared, blocks: Blocks, hidden: Callable[[], torch.Tensor], decay: torch.Tensor,
    options: DistillSection, compute: torch.dtype,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Denominators that hang on the drafter's law: those of D-PACE and of the selector's cross-entropy."""
    unary, chosen = by_law(drafter, options.weights(drafter.config.kind))
    slots, inject = supervised(blocks), options.injects
    inputs = slot_inputs(drafter, shared, blocks, hidden(), slots, False)
    found, taught = {}, decay[slots.slot]
    if "dpace" in unary:
        part = block_parts({"dpace": unary["dpace"]}, options, shared, inputs, blocks.mask, compute)["dpace"]
        found["dpace"], taught = part.denominator, part.weights["ce"] / unary["dpace"]
    if "selector" in chosen:
        assert drafter.selector is not None
        if not inject:
            _, _, top = weighted_losses(
                inputs.rows, shared.head_as(compute), inputs.markov, {}, chunk=options.chunk_rows, compute=compute,
                fused=options.fused == "on", top_k=drafter.selector.top_k,
            )  # fmt: skip
            assert top is not None
            before = slots.before[slots.source]
            taught = taught * candidates_of(drafter.selector, inputs.rows, before, top, shared.head, False, options.chunk_rows, compute).found
        found["selector"] = taught.sum()
    return found


@torch.no_grad()
def count_branches(
    drafter: Drafter, shared: Shared, batch: Batch, options: DistillSection, end_ids: Sequence[int], compute: torch.dtype,
    generator: torch.Generator | None, drawn: Drawn | None = None,
) -> Counted:  # fmt: skip
    """For `onpolicy` with the same arguments: draws the branches, as their end tokens say which slots there are."""
    clock = Clock(batch.last.device)
    drawn = drawn or Drawn(draw(drafter, shared, batch, options, compute, generator))
    mask = branch_mask(batch, drawn.tokens, options.branches_per_anchor, end_ids)
    found = of_masks(mask, slot_weights(drafter, batch, options, compute), options.weights(drafter.config.kind))
    clock.lap("sample")
    return Counted(found, drawn, seconds=clock.seconds)


@torch.no_grad()
def count_rollouts(both: Pair, batch: Batch, options: DistillSection, compute: torch.dtype, end_ids: Collection[int]) -> Counted:
    """For `draft_opd` with the same arguments: decodes the rounds, which say what is learnt from."""
    if without_answer(batch):
        zero = torch.zeros((), device=batch.last.device)
        return Counted({"rounds": zero, "confidence": zero})
    rolled, seconds = timed_rounds(both, batch, compute)
    found = rows_of(rolled, options, end_ids, torch.promote_types(both.drafter.fc.weight.dtype, torch.float32))
    return Counted(round_denominators(found, weights_of(found, options, both.drafter.config.draft_tokens)), rolled=rolled, seconds=seconds)
