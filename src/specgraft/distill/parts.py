"""The supervised slots of a step as rows of the vocabulary losses, and what each loss weighs them with.

Legend: B rows, N blocks, G draft tokens, D hidden size, V vocabulary, R supervised slots, r Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.config import DistillSection
from specgraft.distill.batch import Blocks, Slots
from specgraft.distill.weights import accept_ratios, dpace_weights, end_to_end_blocks, end_to_end_weights, prefix
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.naive import POINTWISE, Rows, SlotLosses

# every sum over slots that a step may tell; ranks must send the same ones, also where one of them has none
SUMS = ("count", "bce", *SlotLosses._fields, "selector", "taught", "recall", "mass", "picked", "oracle", "path", "accepted")


@dataclass(frozen=True)
class Inputs:
    """Supervised slots of a batch as the vocabulary losses want them. Filled by `slot_inputs`."""

    slots: Slots
    rows: Rows
    embedded: torch.Tensor | None  # [R, r] Markov embedding of the token before each slot
    markov: torch.Tensor | None  # [V, r] W2


def slot_inputs(drafter: Drafter, shared: Shared, blocks: Blocks, hidden: torch.Tensor, slots: Slots, target: bool = True) -> Inputs:
    """Gathers the rows of `slots` from hidden [B,N,G,D]; `target` False where no loss reads the target's law."""
    head = drafter.markov_head
    at_slot = (slots.row, slots.block, slots.slot)
    final = None
    if target:
        with torch.no_grad():
            final = shared.final_norm(blocks.states[slots.places])
    if head is None:
        return Inputs(slots, Rows(hidden[at_slot], slots.label, final, slots.source, None, None), None, None)
    if head.reads_token_only:
        latent, row = head.embed(slots.before), slots.source
        embedded = latent[slots.source] if drafter.confidence_head is not None else None
    else:
        every = head.embed(blocks.tokens[..., :-1])
        latent, row = head.latents(hidden, every)[at_slot], None
        embedded = every[at_slot]
    return Inputs(slots, Rows(hidden[at_slot], slots.label, final, slots.source, latent, row), embedded, head.markov_w2.weight)


@dataclass(frozen=True)
class Part:
    """Losses that share a denominator. Filled by `slot_parts` and `block_parts`."""

    weights: dict[str, torch.Tensor]  # [R] by pointwise loss, objective's weight included
    denominator: torch.Tensor  # scalar, this rank's
    value: torch.Tensor | None = None  # numerator where it is not the weighted sum

    def numerator(self, losses: SlotLosses) -> torch.Tensor:
        if self.value is not None:
            return self.value
        return sum(((w * getattr(losses, name)).sum() for name, w in self.weights.items()), torch.zeros_like(self.denominator))


def slot_parts(mix: dict[str, float], weight: torch.Tensor) -> dict[str, Part]:
    """The pointwise losses under fixed slot weights [R]; the part is there even when empty, as confidence shares it."""
    return {"slots": Part({name: mix[name] * weight for name in POINTWISE if name in mix}, weight.sum())}


def block_parts(
    mix: dict[str, float],
    options: DistillSection,
    shared: Shared,
    inputs: Inputs,
    mask: torch.Tensor,
    compute: torch.dtype,
    own: bool = False,
) -> dict[str, Part]:
    """D-PACE and E2E-TV: a first pass without graph gives every slot its weight."""
    wanted = {name for name, loss in (("ce", "dpace"), ("alpha", "e2e_tv")) if loss in mix}
    if not wanted:
        return {}
    slots, exact = inputs.slots, own and "e2e_tv" in mix and options.prefix_weights == "exact"
    if exact:
        wanted.add("target_ce")
    with torch.no_grad():
        _, first, _ = weighted_losses(
            inputs.rows, shared.head_as(compute), inputs.markov, {}, want=wanted, chunk=options.chunk_rows, compute=compute,
            fused=options.fused == "on",
        )
    parts: dict[str, Part] = {}
    at_slot = (slots.row, slots.block, slots.slot)
    if "dpace" in mix:
        weight = dpace_weights(slots.grid(first.ce, mask), mask, options.dpace_delta)[at_slot]
        parts["dpace"] = Part({"ce": mix["dpace"] * weight}, weight.sum())
    if "e2e_tv" in mix:
        assert first.alpha is not None
        alpha = slots.grid(first.alpha, mask)
        before = prefix(slots.grid(accept_ratios(first), mask), mask) if exact else None
        value = mix["e2e_tv"] * end_to_end_blocks(alpha, mask, before).sum()
        weight = mix["e2e_tv"] * end_to_end_weights(alpha, mask, before)[at_slot]
        parts["e2e_tv"] = Part({"tv": weight}, mask.any(-1).sum().to(weight.dtype), value)
    return parts


def by_slot(values: torch.Tensor, slot: torch.Tensor, draft_tokens: int) -> torch.Tensor:
    """Sums [G] of values [R] at slots [R]."""
    return torch.zeros(draft_tokens, device=values.device).index_add_(0, slot, values.float())


def slot_sums(losses: SlotLosses, slot: torch.Tensor, draft_tokens: int) -> dict[str, torch.Tensor]:
    """Per-slot sums of what was computed, and how many slots there were."""
    sums = {name: by_slot(value, slot, draft_tokens) for name, value in losses._asdict().items() if value is not None}
    sums["count"] = by_slot(torch.ones_like(losses.ce), slot, draft_tokens)
    return sums
