"""The exact accept rule of speculative sampling (algorithms.md 4; Leviathan 2211.17192, Chen 2302.01318).

Legend: B rows, G drafts, V vocabulary, W = 1 + most drafts verified of a row. p[:, i] is the target's law of the token behind
draft i, p[:, G] the bonus law.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from specgraft.ops.sampling import draw
from specgraft.records import Verdict

LEAST_MASS = 1e-8  # a residual with no more mass than this is rounding: the target's own law is used


def verify_greedy(
    best: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """best [B,W] the target's most likely ids, drafts [B,G] -> accepted [B] and the token behind them [B].

    The first lengths[b] <= W-1 <= G drafts are verified, all by default (W = G+1).
    """
    width = best.shape[1] - 1
    accepted = _leading(_within(best[:, :-1] == drafts[:, :width], lengths))
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def verify_sampled(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    accept_uniforms: torch.Tensor,
    next_uniforms: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """p [B,W,V], q [B,G,V] the law draft j was drawn from, drafts [B,G], uniforms [B,G] and [B] in [0,1).

    Draft j is accepted iff u_j q_j(d_j) < p_j(d_j); at the first failure the token comes from (p-q)+ normalised, behind
    the lengths[b] <= W-1 drafts that are verified (all by default) from p alone; with none this is one ordinary draw.
    Returns accepted [B] and the token behind the accepted drafts [B].
    """
    width = p.shape[1] - 1
    chosen = drafts[:, :width, None]
    p_drafts, q_drafts = p[:, :-1].gather(-1, chosen)[..., 0], q[:, :width].gather(-1, chosen)[..., 0]
    accepted = _leading(_within(accept_uniforms[:, :width] * q_drafts < p_drafts, lengths))
    return accepted, draw(behind(p, q, accepted, lengths), next_uniforms)


def behind(
    p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Law [B,V], not normalised, of the token behind `accepted` drafts: the residual, or p after all that were verified."""
    row = torch.arange(len(p), device=p.device)
    full = accepted == (q.shape[1] if lengths is None else lengths)
    law = p[row, accepted]
    residual = (law - q[row, accepted.clamp(max=q.shape[1] - 1)]).clamp(min=0)
    keep = full | (residual.sum(-1) <= LEAST_MASS)
    return torch.where(keep[:, None], law, residual)


def commit(
    drafts: Sequence[int], accepted: int, following: int, end_ids: Collection[int], room: int
) -> tuple[Verdict, str]:
    """What one row commits, and why it ends there: "stop", "length", or "" to go on.

    An accepted end token is the last one and there is no bonus behind it; `room` >= 1 tokens are still wanted. A verdict
    with as many committed tokens as accepted drafts was cut in this way: later drafts were neither accepted nor refused.
    """
    tokens = [*drafts[:accepted], following][:room]
    for count, token in enumerate(tokens, 1):
        if token in end_ids:
            return Verdict(min(accepted, count), tuple(tokens[:count]), len(drafts)), "stop"
    reason = "length" if len(tokens) == room else ""
    return Verdict(min(accepted, len(tokens)), tuple(tokens), len(drafts)), reason


def _within(flags: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """flags [B,W-1] of the slots that are verified; the others are False."""
    return flags if lengths is None else flags & (torch.arange(flags.shape[1], device=flags.device) < lengths[:, None])


def _leading(flags: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of True in flags [B,G]."""
    return flags.long().cumprod(1).sum(1)
