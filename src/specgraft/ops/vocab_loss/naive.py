"""Definition of the per-slot vocabulary losses (algorithms.md 3.2; DSpark eqs. 9 to 11).

Legend: R rows (supervised slots), D hidden size, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotLosses(NamedTuple):
    """Per slot, [R] each."""

    ce: torch.Tensor  # -log q(label)
    l1: torch.Tensor  # sum over v of |p - q|, no half
    alpha: torch.Tensor  # overlap, sum over v of min(p, q) = 1 - l1 / 2
    hit: torch.Tensor  # 1 where argmax q = argmax p
    kl: torch.Tensor  # KL(p || q)


def slot_losses(
    hidden: torch.Tensor,
    embedded: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    head: torch.Tensor,
    markov: torch.Tensor,
) -> SlotLosses:
    """Losses of q = softmax(head h + markov e) against p = softmax(head t) and the data token.

    hidden h [R,D], embedded e [R,r], target_hidden t [R,D] (after the final norm), labels [R] ids,
    head [V,D], markov [V,r]. All in the dtype given; use float64 for reference values.
    """
    logits = hidden @ head.T + embedded @ markov.T
    target = (target_hidden @ head.T).detach()
    log_q = logits.log_softmax(-1)
    q, log_p = log_q.exp(), target.log_softmax(-1)
    p = log_p.exp()
    ce = -log_q.gather(-1, labels[:, None])[:, 0]
    l1 = (p - q).abs().sum(-1)
    hit = (logits.argmax(-1) == target.argmax(-1)).to(q.dtype)
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    return SlotLosses(ce, l1, 1 - l1 / 2, hit, kl)
