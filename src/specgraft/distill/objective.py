"""What the blocks of a step cost: any mix of pointwise losses, D-PACE, E2E-TV, selector and confidence losses.

`objective` teaches blocks by the reference answers (off-policy); `learn` takes blocks whatever they are taught by.

Every part is a numerator over a denominator, both summed over all ranks (algorithms.md 3.1); parts whose denominators
differ are divided one by one. Denominators hold no graph, so they are summed first and the head products run once.
Legend: B rows, T tokens, N anchors, G draft tokens, D hidden size, R supervised slots, U source positions, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from specgraft.config import DistillSection
from specgraft.distill.batch import Batch, Blocks, references, supervised
from specgraft.distill.parts import Inputs, block_parts, by_slot, slot_inputs, slot_parts, slot_sums
from specgraft.distill.ranks import LEAST, over_step, touched, world
from specgraft.distill.selector import by_law, candidates_of, selector_term
from specgraft.distill.weights import accept_ratios, decay_weights, prefix
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses
from specgraft.ops.vocab_loss.naive import POINTWISE, SlotLosses

READS_TARGET = {*POINTWISE, "e2e_tv"} - {"ce"}


@dataclass(frozen=True)
class Outcome:
    """What a step gives. Filled by `learn`."""

    loss: torch.Tensor  # scalar with graph: sum over parts of numerator / denominator of all ranks, times the ranks
    numerators: dict[str, torch.Tensor]  # per part, this rank's, no graph
    denominators: dict[str, torch.Tensor]  # per part, of all ranks
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # [G] sums over this rank's slots of ce, alpha, .., and their `count`
    seconds: dict[str, float] = field(default_factory=dict)  # by what was done, where a step has parts


def forward(drafter: Drafter, shared: Shared, batch: Batch, compute: torch.dtype) -> torch.Tensor:
    """h [B,N,G,D] of every block; products in `compute`."""
    half = compute not in (torch.float32, torch.float64)
    texts = batch.texts
    if not half and texts.taps.dtype in (torch.bfloat16, torch.float16):
        texts = replace(texts, taps=texts.taps.to(compute))
    with torch.autocast(batch.last.device.type, dtype=compute, enabled=half):
        return drafter(shared, texts, batch.anchors.position)


def objective(
    drafter: Drafter,
    shared: Shared,
    batch: Batch,
    options: DistillSection,
    compute: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    known: Mapping[str, torch.Tensor] | None = None,
) -> Outcome:
    """The loss of one batch on its answers. `compute` is the dtype of matrix products; sums and losses are float32 at least.

    `options.slot_sampling` keeps slot j with probability w_j and weight 1 (an unbiased estimate of both sums, which
    computes head rows for about half of the slots at decay 4, G 7). `known` as in `learn`.
    """
    refuse_idle(drafter, options)
    hidden = forward(drafter, shared, batch, compute)
    blocks, decay = taught_blocks(batch, drafter.config.draft_tokens, options, generator)
    return learn(drafter, shared, blocks, hidden, decay, options, compute, known=known)


def taught_blocks(
    batch: Batch, draft_tokens: int, options: DistillSection, generator: torch.Generator | None
) -> tuple[Blocks, torch.Tensor]:
    """The blocks that the answers teach, and the fixed weights [G] of their slots."""
    blocks, decay = references(batch), decay_weights(draft_tokens, options.decay).to(batch.last.device)
    if options.slot_sampling:
        drawn = batch.uniforms(1, draft_tokens, generator).to(decay.device)
        blocks, decay = replace(blocks, mask=blocks.mask & (drawn < decay)), torch.ones_like(decay)
    return blocks, decay


def refuse_idle(drafter: Drafter, options: DistillSection) -> None:
    """Raises ValueError for a mix without sense, or one that says nothing of this drafter. Run files with a kind of ours are asked when they are read."""
    options.check_losses(drafter.config.kind, drafter.selector is not None, drafter.confidence_head is not None)


def learn(
    drafter: Drafter,
    shared: Shared,
    blocks: Blocks,
    hidden: torch.Tensor,
    decay: torch.Tensor,
    options: DistillSection,
    compute: torch.dtype,
    own: bool = False,
    known: Mapping[str, torch.Tensor] | None = None,
) -> Outcome:
    """The loss of blocks with states hidden [B,N,G,D] and fixed slot weights decay [G].

    `known`: the denominators of the whole step, where these blocks are a part of one (`counting`); None: they and those
    of the other ranks are the step. `own`: the tokens are the drafter's, drawn from its law; then labels say nothing, and accept ratios say how far a round goes.
    """
    mix = options.weights(drafter.config.kind)
    unary, chosen = by_law(drafter, mix)
    confident = drafter.confidence_head is not None and "confidence" in mix
    slots, mask = supervised(blocks), blocks.mask
    inject = "selector" in mix and options.injects
    inputs = slot_inputs(drafter, shared, blocks, hidden, slots, own or confident or inject or bool(set(mix) & READS_TARGET))
    weight = decay[slots.slot]
    parts = slot_parts(unary, weight) | block_parts(unary, options, shared, inputs, mask, compute, own)
    denominators = over_step({name: part.denominator for name, part in parts.items()}, known)
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
        term = selector_term(drafter.selector, candidates, shared.head, slots, mask, chosen, weight, taught, options, own, known)
        value = value + term.value
        shown.add(term.numerators, term.denominators, {name: by_slot(each, slots.slot, len(decay)) for name, each in term.slots.items()})
    elif own and options.branch_temperature == 1:
        assert losses.alpha is not None
        before = prefix(slots.grid(accept_ratios(losses), mask), mask)[slots.row, slots.block, slots.slot]
        shown.sums["accepted"] = by_slot(before * losses.alpha, slots.slot, len(decay))
    if own:  # labels and what is made of them
        shown.sums = {name: values for name, values in shown.sums.items() if name not in ("ce", "target_ce")}
    if not len(slots) or world() > 1:
        value = value + touched(drafter, hidden)
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
