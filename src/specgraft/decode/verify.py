"""The exact accept rule of speculative sampling (algorithms.md 4; Leviathan 2211.17192, Chen 2302.01318).

Legend: B rows, G drafts, V vocabulary. p[:, i] is the target's law of the token behind draft i, p[:, G] the bonus law.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from specgraft.ops.sampling import draw
from specgraft.records import Verdict

LEAST_MASS = 1e-8  # a residual with no more mass than this is rounding: the target's own law is used


def verify_greedy(best: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """best [B,G+1] the target's most likely ids, drafts [B,G] -> accepted [B] and the token behind them [B]."""
    accepted = _leading(best[:, :-1] == drafts)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def verify_sampled(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, accept_uniforms: torch.Tensor, next_uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """p [B,G+1,V], q [B,G,V] the law draft j was drawn from, drafts [B,G], uniforms [B,G] and [B] in [0,1).

    Draft j is accepted iff u_j q_j(d_j) < p_j(d_j); at the first failure the token comes from (p-q)+ normalised, behind
    G accepted drafts from p alone. Returns accepted [B] and the token behind the accepted drafts [B].
    """
    p_drafts = p[:, :-1].gather(-1, drafts[..., None])[..., 0]
    q_drafts = q.gather(-1, drafts[..., None])[..., 0]
    accepted = _leading(accept_uniforms * q_drafts < p_drafts)
    return accepted, draw(behind(p, q, accepted), next_uniforms)


def behind(p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Law [B,V], not normalised, of the token behind `accepted` drafts: the residual, or the bonus law after all G."""
    row = torch.arange(len(p), device=p.device)
    full = accepted == q.shape[1]
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


def _leading(flags: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of True in flags [B,G]."""
    return flags.long().cumprod(1).sum(1)
