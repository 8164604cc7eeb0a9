"""Definition of the per-slot vocabulary losses (algorithms.md 3.2), any dtype, plain autograd.

Legend: R rows (supervised slots), U unique source rows, M latent rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

POINTWISE = ("ce", "kl", "rkl", "jsd", "tv", "l1", "lk_alpha", "lk_hybrid")
ALPHA_FLOOR = 1e-6  # lk_alpha below it is constant (algorithms.md 3.11)


class SlotLosses(NamedTuple):
    """Per slot, [R] each; None where it was not asked for or there is no target."""

    ce: torch.Tensor  # -log q(label)
    kl: torch.Tensor | None = None  # KL(p || q)
    rkl: torch.Tensor | None = None  # KL(q || p)
    jsd: torch.Tensor | None = None  # (KL(p || mix) + KL(q || mix)) / 2, mix = (p + q) / 2
    tv: torch.Tensor | None = None  # half of l1
    l1: torch.Tensor | None = None  # sum over v of |p - q|, no half
    lk_alpha: torch.Tensor | None = None  # -log alpha, alpha at least ALPHA_FLOOR
    lk_hybrid: torch.Tensor | None = None  # share kl + (1 - share) tv, share = exp(-eta alpha) without gradient
    alpha: torch.Tensor | None = None  # overlap, sum over v of min(p, q) = 1 - tv
    hit: torch.Tensor | None = None  # 1 where argmax p (the first of equals) is a maximum of q
    target_ce: torch.Tensor | None = None  # -log p(label), a constant


@dataclass(frozen=True)
class Rows:
    """Inputs of R slots; equal sources and equal latents are stored once. Filled by `distill`."""

    hidden: torch.Tensor  # [R, D] draft states after the final norm
    labels: torch.Tensor  # [R] ids
    target_hidden: torch.Tensor | None = None  # [U, D] target states after the final norm; None: ce only
    source: torch.Tensor | None = None  # [R] row of target_hidden for each slot; None: U = R, in order
    latent: torch.Tensor | None = None  # [M, rank] Markov latents; None: no Markov head
    latent_row: torch.Tensor | None = None  # [R] row of latent for each slot; None: M = R, in order


def slot_losses(
    rows: Rows, head: torch.Tensor, markov: torch.Tensor | None, eta: float = 3.0, softcap: float = 0.0
) -> SlotLosses:
    """Losses of q = softmax(head h + markov e) against p = softmax(head t), and -log q of the label.

    head [V,D] and the target's states are frozen; markov [V,rank]. softcap c > 0: logits z become c tanh(z / c).
    Use float64 for reference values.
    """
    logits = rows.hidden @ head.detach().T
    if rows.latent is not None:
        assert markov is not None, "latents need the Markov matrix"
        latent = rows.latent if rows.latent_row is None else rows.latent[rows.latent_row]
        logits = logits + latent @ markov.T
    log_q = _cap(logits, softcap).log_softmax(-1)
    ce = -log_q.gather(-1, rows.labels[:, None])[:, 0]
    if rows.target_hidden is None:
        return SlotLosses(ce)
    with torch.no_grad():
        target = rows.target_hidden if rows.source is None else rows.target_hidden[rows.source]
        log_p = _cap(target @ head.T, softcap).log_softmax(-1)
    target_ce = -log_p.gather(-1, rows.labels[:, None])[:, 0]
    return losses_of(log_p, log_q, ce, eta)._replace(target_ce=target_ce)


def losses_of(log_p: torch.Tensor, log_q: torch.Tensor, ce: torch.Tensor, eta: float = 3.0) -> SlotLosses:
    """The losses of two laws given by their logarithms, [R,V] each."""
    p, q = log_p.exp(), log_q.exp()
    log_mix = torch.logaddexp(log_p, log_q) - math.log(2)
    kl = _mean(p, log_p - log_q)
    l1 = (p - q).abs().sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    share = torch.exp(-eta * alpha.detach())
    return SlotLosses(
        ce=ce,
        kl=kl,
        rkl=_mean(q, log_q - log_p),
        jsd=(_mean(p, log_p - log_mix) + _mean(q, log_q - log_mix)) / 2,
        tv=l1 / 2,
        l1=l1,
        lk_alpha=-alpha.clamp_min(ALPHA_FLOOR).log(),
        lk_hybrid=share * kl + (1 - share) * l1 / 2,
        alpha=alpha,
        hit=(log_q.gather(-1, log_p.argmax(-1, keepdim=True))[:, 0] == log_q.amax(-1)).to(q.dtype),
    )


def _mean(law: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """E_law[values], [R]; ids of probability 0 contribute 0."""
    return torch.where(law > 0, law * values, 0.0).sum(-1)


def _cap(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
