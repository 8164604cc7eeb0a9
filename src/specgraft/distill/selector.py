"""The losses of a drafter whose drafts follow a selector's law: zero outside the top candidates (algorithms.md 3.6, 3.7).

The overlap losses and what a step reports of acceptance are the selector's, as its law is the one that drafts; ce, kl, rkl,
jsd and dpace stay with the unary law, whose task is that the candidates are there.
Legend: R supervised slots, N anchors, G draft tokens, D hidden size, k candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specgraft.config import DistillSection
from specgraft.distill.batch import Slots
from specgraft.distill.ranks import LEAST, over_step
from specgraft.distill.weights import end_to_end_blocks, end_to_end_weights, prefix
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.selector import Selector
from specgraft.ops.selector_loss.chunked import target_at, weighted_selector_losses
from specgraft.ops.selector_loss.naive import Candidates, SelectorLosses
from specgraft.ops.vocab_loss.naive import Rows

OVERLAP = ("tv", "l1", "lk_alpha")
ALWAYS = ("alpha", "hit", "mass", "picked")  # told whatever is minimised


def by_law(drafter: Drafter, mix: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The objectives of `mix` on the unary law, and those on the selector's."""
    if drafter.selector is None:
        return mix, {}
    chosen = {name: weight for name, weight in mix.items() if name in (*OVERLAP, "selector", "e2e_tv")}
    return {name: weight for name, weight in mix.items() if name not in chosen}, chosen


def candidates_of(
    selector: Selector,
    rows: Rows,
    previous: torch.Tensor,
    ids: torch.Tensor,
    head: torch.Tensor,
    inject: bool = False,
    chunk: int = 64,
    compute: torch.dtype = torch.float32,
) -> Candidates:
    """Slots with candidates ids [R,k] (the top of W h) behind the tokens previous [R]; p where `rows` has the target's states.

    The label is the text's token, with `inject` the target's most likely one.
    """
    p = best = None
    if rows.target_hidden is not None:
        source = rows.source if rows.source is not None else torch.arange(len(ids), device=ids.device)
        p, best = target_at(rows.target_hidden, source, ids, head, chunk, compute)
    assert not inject or best is not None, "an injected label is the target's"
    label = best if inject and best is not None else rows.labels
    return Candidates(rows.hidden, selector.gate(rows.hidden, previous), ids, label, inject, p, best)


@dataclass(frozen=True)
class Term:
    """What the selector adds to a step. Filled by `selector_term`."""

    value: torch.Tensor  # scalar with graph: the parts' weighted sums over their denominators
    numerators: dict[str, torch.Tensor]  # per part, this rank's, no graph
    denominators: dict[str, torch.Tensor]  # per part, of all ranks
    slots: dict[str, torch.Tensor]  # [R] of every slot: alpha, hit, recall, ..; `selector` is 0 where `taught` is


def selector_term(
    selector: Selector,
    candidates: Candidates,
    head: torch.Tensor,
    slots: Slots,
    mask: torch.Tensor,
    mix: Mapping[str, float],
    weight: torch.Tensor,
    taught: torch.Tensor,
    options: DistillSection,
    own: bool = False,
    known: Mapping[str, torch.Tensor] | None = None,
) -> Term:
    """The objectives `mix` on the selector's law; mask [B,N,G]; `own` and `known` as in `objective.learn`.

    weight [R]: the slots' fixed weights; taught [R]: those of the cross-entropy, which are D-PACE's where that is on (NeMo,
    speculators). A slot whose label is no candidate leaves the cross-entropy's denominator with it, unless it is injected.
    """
    found, chunk = candidates.found, options.chunk_rows
    at_slot = (slots.row, slots.block, slots.slot)
    parts: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}  # weights [R] by loss; denominator
    shown: dict[str, torch.Tensor] = {}
    if "selector" in mix:
        kept = taught if candidates.inject else taught * found
        parts["selector"] = ({"selector": mix["selector"] * kept}, kept.sum())
    if over := {name: mix[name] * weight for name in OVERLAP if name in mix}:
        parts["overlap"] = (over, weight.sum())
    if "e2e_tv" in mix:
        with torch.no_grad():
            _, first = weighted_selector_losses(candidates, head, selector.successor_codebook, {}, chunk)
        assert first.alpha is not None
        alpha = slots.grid(first.alpha, mask)
        exact = own and options.prefix_weights == "exact"
        before = prefix(slots.grid(accept_ratios(candidates, first), mask), mask) if exact else None
        reach = mix["e2e_tv"] * end_to_end_weights(alpha, mask, before)[at_slot]
        parts["e2e_tv"] = ({"tv": reach}, mask.any(-1).sum().to(reach.dtype))
        shown["e2e_tv"] = mix["e2e_tv"] * end_to_end_blocks(alpha, mask, before).sum()
    denominators: dict[str, torch.Tensor] = {}
    if parts:
        denominators = over_step({name: denominator.to(weight.dtype) for name, (_, denominator) in parts.items()}, known)
    weights: dict[str, torch.Tensor] = {}
    for name, (losses, _) in parts.items():
        for loss, value in losses.items():
            weights[loss] = weights.get(loss, 0.0) + value / (denominators[name] + LEAST)
    value, found_losses = weighted_selector_losses(candidates, head, selector.successor_codebook, weights, chunk)
    numerators = {
        name: shown.get(name, sum((w * getattr(found_losses, loss)).sum() for loss, w in losses.items()))
        for name, (losses, _) in parts.items()
    }
    told = {name: part for name, part in found_losses._asdict().items() if part is not None and (name in mix or name in ALWAYS)}
    if own:
        told.pop("picked")
        if options.branch_temperature == 1:
            assert found_losses.alpha is not None
            told["accepted"] = prefix(slots.grid(accept_ratios(candidates, found_losses), mask), mask)[at_slot] * found_losses.alpha
        return Term(value, numerators, denominators, told)
    told["recall"] = found.to(weight.dtype)
    if "selector" in mix:
        told["taught"] = torch.ones_like(told["recall"]) if candidates.inject else told["recall"]
    if not options.slot_sampling:
        told |= prefixes(slots, mask, found, found_losses.picked > 0)
    return Term(value, numerators, denominators, told)


def accept_ratios(candidates: Candidates, losses: SelectorLosses) -> torch.Tensor:
    """min(1, p/q) of the slots' own labels, [R]; 1 for one that is no candidate, whose q is 0."""
    assert candidates.p is not None
    p = torch.where(candidates.ids == candidates.label[:, None], candidates.p, 0.0).sum(-1)
    return torch.where(candidates.found, (p * losses.selector.exp()).clamp(max=1), 1.0)


def prefixes(slots: Slots, mask: torch.Tensor, found: torch.Tensor, picked: torch.Tensor) -> dict[str, torch.Tensor]:
    """[R] 1 where every slot of the block up to this one has its label among the candidates (`oracle`), or picks it (`path`).

    One plus the sum over slots of their means: the accept length that the best selector would have on these candidates, and
    this one's, both behind the text's own tokens.
    """
    at_slot = (slots.row, slots.block, slots.slot)
    return {
        name: slots.grid(flags.long(), mask).cumprod(-1)[at_slot].float() for name, flags in (("oracle", found), ("path", picked))
    }
