"""Detached slot weights: fixed decay, D-PACE, and those that make a TV loss the end-to-end one.

Legend: .. any leading shape, G draft tokens.
"""

from __future__ import annotations

import torch

from specgraft.ops.vocab_loss.naive import SlotLosses


def decay_weights(draft_tokens: int, decay: float) -> torch.Tensor:
    """w_j = exp(-(j-1)/decay), [G] (DFlash, DeepSpec; algorithms.md 3.1)."""
    return torch.exp(-torch.arange(draft_tokens, dtype=torch.float32) / decay)


def dpace_weights(ce: torch.Tensor, mask: torch.Tensor, delta: float) -> torch.Tensor:
    """D-PACE weights [..,G] of slots with cross-entropy ce [..,G]; 0 where mask [..,G] is False (2605.18810; algorithms.md 3.4).

    w_j = sum over supervised i >= j of P_i, with P_i the product of (1-delta) exp(-ce) + delta over the slots up to i.
    """
    kept = torch.where(mask, (1 - delta) * torch.exp(-ce) + delta, 1.0)
    reach = torch.where(mask, kept.cumprod(-1), 0.0)
    return torch.where(mask, reach.flip(-1).cumsum(-1).flip(-1), 0.0)


def survival(alpha: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """S_j [..,G], product of the overlaps up to j; a slot that is not supervised counts as 1."""
    return torch.where(mask, alpha, 1.0).cumprod(-1)


def prefix(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[..,G] product of the values [..,G] of the slots before each; a slot that is not supervised counts as 1."""
    kept = torch.where(mask, values, 1.0)
    return torch.cat([torch.ones_like(kept[..., :1]), kept.cumprod(-1)[..., :-1]], -1)


def accept_ratios(losses: SlotLosses) -> torch.Tensor:
    """min(1, p/q) of the slots' own labels, [R]: the chance that each is accepted, once it was drawn from q."""
    assert losses.target_ce is not None
    return torch.exp((losses.ce - losses.target_ce).clamp(max=0))


def end_to_end_blocks(alpha: torch.Tensor, mask: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """L_block [..] = 1 - mean of S_j over the supervised slots; 0 for a block without (AngelSpec; algorithms.md 3.7).

    `before` [..,G] takes the place of S_{j-1} in S_j = S_{j-1} alpha_j.
    """
    count = mask.sum(-1)
    reached = survival(alpha, mask) if before is None else before * alpha
    mean = (reached * mask).sum(-1) / count.clamp(min=1)
    return torch.where(count > 0, 1 - mean, 0.0)


def end_to_end_weights(alpha: torch.Tensor, mask: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """c_j [..,G] such that the gradient of L_block is that of sum c_j TV_j (algorithms.md 3.7).

    c_j = S_{j-1} C_j / G_v with C_j = m_j + alpha_{j+1} C_{j+1}, by the backward recursion: nothing is divided by alpha.
    `before` [..,G] takes the place of S_{j-1} (algorithms.md 3.8, end): accept ratios of the tokens that lie there.
    """
    overlap = torch.where(mask, alpha, 1.0)
    before = prefix(alpha, mask) if before is None else before
    out, behind = [], torch.zeros_like(overlap[..., 0])
    for slot in range(overlap.shape[-1] - 1, -1, -1):
        follows = overlap[..., slot + 1] * behind if slot + 1 < overlap.shape[-1] else behind
        behind = mask[..., slot].to(overlap.dtype) + follows
        out.append(behind)
    coefficients = torch.stack(out[::-1], -1)
    return torch.where(mask, before * coefficients / mask.sum(-1, keepdim=True).clamp(min=1), 0.0)
