"""What the blocks of a step cost: any mix of pointwise losses, D-PACE, E2E-TV, selector and confidence losses.

`objective` teaches blocks by the reference answers (off-policy); `learn` takes blocks whatever they are taught by.

Every part is a numerator over a denominator, both summed over all ranks (algorithms.md 3.1); parts whose denominators
differ are divided one by one. Denominators hold no graph, so they are summed first and the head products run once.
Legend: B rows, T tokens, N anchors, G draft tokens, D hidden size, R supervised slots, U source positions, r Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from specgraft.config import DistillSection
from specgraft.distill.batch import Batch, Blocks, Slots, references, supervised
from specgraft.distill.ranks import LEAST, total, world
from specgraft.distill.selector import by_law, candidates_of, selector_term
from specgraft.distill.weights import (
    accept_ratios,
    decay_weights,
    dpace_weights,
    end_to_end_blocks,
    end_to_end_weights,
    prefix,
)
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.naive import POINTWISE, Rows, SlotLosses

READS_TARGET = {*POINTWISE, "e2e_tv"} - {"ce"}


@dataclass(frozen=True)
class Outcome:
    """What a step gives. Filled by `learn`."""

    loss: torch.Tensor  # scalar with graph: sum over parts of numerator / denominator of all ranks, times the ranks
    numerators: dict[str, torch.Tensor]  # per part, this rank's, no graph
    denominators: dict[str, torch.Tensor]  # per part, of all ranks
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # [G] sums over this rank's slots of ce, alpha, .., and their `count`
    seconds: dict[str, float] = field(default_factory=dict)  # by what was done, where a step has parts


@dataclass(frozen=True)
class Inputs:
    """Supervised slots of a batch as the vocabulary losses want them. Filled by `slot_inputs`."""

    slots: Slots
    rows: Rows
    embedded: torch.Tensor | None  # [R, r] Markov embedding of the token before each slot
    markov: torch.Tensor | None  # [V, r] W2


def forward(drafter: Drafter, shared: Shared, batch: Batch, compute: torch.dtype) -> torch.Tensor:
    """h [B,N,G,D] of every block; products in `compute`."""
    half = compute not in (torch.float32, torch.float64)
    with torch.autocast(batch.last.device.type, dtype=compute, enabled=half):
        return drafter(shared, batch.texts, batch.anchors.position)


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


def objective(
    drafter: Drafter,
    shared: Shared,
    batch: Batch,
    options: DistillSection,
    compute: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Outcome:
    """The loss of one batch on its answers. `compute` is the dtype of matrix products; sums and losses are float32 at least.

    `options.slot_sampling` keeps slot j with probability w_j and weight 1 (an unbiased estimate of both sums, which
    computes head rows for about half of the slots at decay 4, G 7).
    """
    refuse_idle(drafter, options)
    hidden = forward(drafter, shared, batch, compute)
    blocks, decay = references(batch), decay_weights(drafter.config.draft_tokens, options.decay).to(hidden.device)
    if options.slot_sampling:
        drawn = torch.rand(blocks.mask.shape, generator=generator).to(hidden.device)
        blocks, decay = replace(blocks, mask=blocks.mask & (drawn < decay)), torch.ones_like(decay)
    return learn(drafter, shared, blocks, hidden, decay, options, compute)


def refuse_idle(drafter: Drafter, options: DistillSection) -> None:
    """Raises ValueError for a mix without sense, or one that says nothing of this drafter."""
    mix = options.weights(drafter.config.kind)
    unary, chosen = by_law(drafter, mix)
    confident = drafter.confidence_head is not None and "confidence" in mix
    if not unary.keys() - {"confidence"} and not chosen and not confident:
        raise ValueError(f"distill: nothing to minimise for a {drafter.config.kind} drafter; give a loss a weight, or set distill.preset")


def learn(
    drafter: Drafter,
    shared: Shared,
    blocks: Blocks,
    hidden: torch.Tensor,
    decay: torch.Tensor,
    options: DistillSection,
    compute: torch.dtype,
    own: bool = False,
) -> Outcome:
    """The loss of blocks with states hidden [B,N,G,D] and fixed slot weights decay [G].

    `own`: the tokens are the drafter's, drawn from its law; then labels say nothing, and accept ratios say how far a round goes.
    """
    mix = options.weights(drafter.config.kind)
    unary, chosen = by_law(drafter, mix)
    confident = drafter.confidence_head is not None and "confidence" in mix
    slots, mask = supervised(blocks), blocks.mask
    inject = "selector" in mix and options.injects
    inputs = slot_inputs(drafter, shared, blocks, hidden, slots, own or confident or inject or bool(set(mix) & READS_TARGET))
    weight = decay[slots.slot]
    parts = slot_parts(unary, weight) | block_parts(unary, options, shared, inputs, mask, compute, own)
    denominators = dict(zip(parts, total(torch.stack([part.denominator for part in parts.values()])), strict=True))
    weights: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        for pointwise, each in part.weights.items():
            weights[pointwise] = weights.get(pointwise, 0.0) + each / (denominators[name] + LEAST)
    wanted = {"alpha", "hit"} if inputs.rows.target_hidden is not None and drafter.selector is None else set()
    if own and drafter.selector is None:
        wanted = wanted | {"target_ce"}
    value, losses, top = weighted_losses(
        inputs.rows, shared.head_as(compute), inputs.markov, weights, want=wanted, eta=options.lk_eta, chunk=options.chunk_rows,
        compute=compute, fused=options.fused == "on", top_k=0 if drafter.selector is None else drafter.selector.top_k,
    )  # fmt: skip
    shown = Shown({name: part.numerator(losses) for name, part in parts.items()}, denominators, slot_sums(losses, slots.slot, len(decay)))
    if confident:
        value = value + mix["confidence"] * confidence_part(drafter, inputs, losses, weight, mix["confidence"], shown)
    if drafter.selector is not None and top is not None:
        before = slots.before[slots.source]
        candidates = candidates_of(drafter.selector, inputs.rows, before, top, shared.head, inject, options.chunk_rows, compute)
        taught = parts["dpace"].weights["ce"] / mix["dpace"] if "dpace" in parts else weight
        term = selector_term(drafter.selector, candidates, shared.head, slots, mask, chosen, weight, taught, options, own)
        value = value + term.value
        shown.add(term.numerators, term.denominators, {name: by_slot(each, slots.slot, len(decay)) for name, each in term.slots.items()})
    elif own and options.branch_temperature == 1:
        assert losses.alpha is not None
        before = prefix(slots.grid(accept_ratios(losses), mask), mask)[slots.row, slots.block, slots.slot]
        shown.sums["accepted"] = by_slot(before * losses.alpha, slots.slot, len(decay))
    if own:  # labels and what is made of them
        shown.sums = {name: values for name, values in shown.sums.items() if name not in ("ce", "target_ce")}
    if not len(slots) or world() > 1:  # ranks reduce the same gradients, those without slots and unused heads included
        value = value + sum(parameter.sum() for parameter in drafter.parameters()) * 0.0
    total_loss = (value + (shown.loss() - value).detach()) * world()  # the end-to-end part steps along its gradient, and shows its value
    return Outcome(total_loss, shown.numerators, shown.denominators, shown.sums)


@dataclass
class Shown:
    """What a step reports, without graph; grows part by part."""

    numerators: dict[str, torch.Tensor]
    denominators: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]

    def add(self, numerators: dict[str, torch.Tensor], denominators: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
        self.numerators |= numerators
        self.denominators |= denominators
        self.sums |= sums

    def loss(self) -> torch.Tensor:
        return sum((n / (self.denominators[name] + LEAST) for name, n in self.numerators.items()), self.sums["count"].new_zeros(()))


def confidence_part(
    drafter: Drafter, inputs: Inputs, losses: SlotLosses, weight: torch.Tensor, scale: float, shown: Shown
) -> torch.Tensor:
    """BCE of the confidence logits against the overlap under slot weights [R], as numerator / denominator (DSpark eq. 12)."""
    assert drafter.confidence_head is not None and losses.alpha is not None
    logit = drafter.confidence_head(inputs.rows.hidden, inputs.embedded)
    bce = F.binary_cross_entropy_with_logits(logit, losses.alpha.clamp(0, 1).to(logit.dtype), reduction="none")
    every = (weight * bce).sum()
    sums = {"bce": by_slot(bce.detach(), inputs.slots.slot, len(shown.sums["count"]))}
    shown.add({"confidence": scale * every.detach()}, {"confidence": shown.denominators["slots"]}, sums)
    return every / (shown.denominators["slots"] + LEAST)


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
