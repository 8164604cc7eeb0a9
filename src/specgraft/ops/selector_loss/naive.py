"""Definition of the losses of a selector's law, which is zero outside the candidates (algorithms.md 2.8, 3.6).

Z(v) = W[v] h + B[v] g for the k candidates v of a slot, q = softmax of Z over them; p is the target's law over the whole
vocabulary and is never renormalised.
Legend: R rows (supervised slots), U source rows, k candidates, D hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

LEARNT = ("selector", "tv", "l1", "lk_alpha")
ALPHA_FLOOR = 1e-6  # lk_alpha below it is constant (algorithms.md 3.11)


@dataclass(frozen=True)
class Candidates:
    """Inputs of R slots; gradients reach `hidden` and `gate`. Filled by `distill.selector`."""

    hidden: torch.Tensor  # [R, D] draft states after the final norm: the unary logits are W h
    gate: torch.Tensor  # [R, r] g = A[y] * H h, y the token before the slot
    ids: torch.Tensor  # [R, k] candidates, most likely first
    label: torch.Tensor  # [R] id that the cross-entropy wants
    inject: bool  # a label outside the candidates takes the last one's place (speculators), or leaves the slot out (NeMo)
    p: torch.Tensor | None = None  # [R, k] target's probabilities of the candidates, constants
    best: torch.Tensor | None = None  # [R] the target's most likely id

    @property
    def found(self) -> torch.Tensor:
        """[R] bool: the label is a candidate."""
        return (self.ids == self.label[:, None]).any(-1)


class SelectorLosses(NamedTuple):
    """Per slot, [R] each; None where there is no target."""

    selector: torch.Tensor  # -log q(label) among the candidates; 0 for a slot that is left out
    picked: torch.Tensor  # 1 where argmax q = label
    tv: torch.Tensor | None = None  # 1 - alpha
    l1: torch.Tensor | None = None  # twice that
    lk_alpha: torch.Tensor | None = None  # -log alpha
    alpha: torch.Tensor | None = None  # overlap, sum over candidates of min(p, q)
    hit: torch.Tensor | None = None  # 1 where argmax q = argmax p
    mass: torch.Tensor | None = None  # p of the candidates: no law on them has more overlap


def selector_losses(rows: Candidates, head: torch.Tensor, successor: torch.Tensor) -> SelectorLosses:
    """head W [V,D], frozen; successor B [V,r]. Plain autograd, any dtype; float64 for reference values."""

    def scores(ids: torch.Tensor) -> torch.Tensor:
        unary = (rows.hidden[:, None] * head.detach()[ids]).sum(-1)
        return unary + (rows.gate[:, None] * successor[ids]).sum(-1)

    return losses_of(rows, scores(rows.ids), scores(rows.label[:, None])[:, 0])


def losses_of(rows: Candidates, scores: torch.Tensor, of_label: torch.Tensor) -> SelectorLosses:
    """The losses of scores Z [R,k] of the candidates and [R] of the label."""
    found, is_label = rows.found, rows.ids == rows.label[:, None]
    taught = scores
    if rows.inject:
        taught = torch.cat([scores[:, :-1], torch.where(found, scores[:, -1], of_label)[:, None]], -1)
        is_label = torch.cat([is_label[:, :-1], (is_label[:, -1] | ~found)[:, None]], -1)
    # one place is the label's, or none and the sum is 0
    ce = -torch.where(is_label, taught.log_softmax(-1), 0.0).sum(-1)
    chosen = rows.ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
    picked = (chosen == rows.label).to(scores.dtype)
    if rows.p is None:
        return SelectorLosses(ce, picked)
    assert rows.best is not None, "p and the most likely id come together"
    q, p = scores.softmax(-1), rows.p
    alpha = torch.where(q < p, q, p).sum(-1)
    return SelectorLosses(
        selector=ce,
        picked=picked,
        tv=1 - alpha,
        l1=2 * (1 - alpha),
        lk_alpha=-alpha.clamp_min(ALPHA_FLOOR).log(),
        alpha=alpha,
        hit=chosen.eq(rows.best).to(scores.dtype),
        mass=p.sum(-1),
    )


def target_at(
    target_hidden: torch.Tensor, source: torch.Tensor, ids: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """p [R,k] of the candidates ids [R,k], and the most likely id [R], from target states [U,D]; source [R] names their row."""
    logits = target_hidden @ head.T
    return logits.softmax(-1)[source].gather(-1, ids), logits.argmax(-1)[source]
