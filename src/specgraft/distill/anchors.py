"""Where blocks start, and which of their slots are supervised (algorithms.md 2.2; DeepSpec's rule).

Legend: B rows, T tokens, N anchors a row, G draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Anchors:
    """Anchors of one step. Filled by `draw_anchors`."""

    position: torch.Tensor  # [B, N] a, ascending; 0 where not kept
    keep: torch.Tensor  # [B, N] bool
    mask: torch.Tensor  # [B, N, G] bool: slot j-1 (label at a+j) is supervised


def legal_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """[B,T] bool: token a and the token behind it are both supervised, as decoding never drafts inside a prompt."""
    legal = torch.zeros_like(loss_mask)
    legal[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    return legal


def slot_mask(loss_mask: torch.Tensor, position: torch.Tensor, keep: torch.Tensor, draft_tokens: int) -> torch.Tensor:
    """[B,N,G] bool: the supervised prefix of every block, read at the label's position a+j."""
    length = loss_mask.shape[1]
    label = position[..., None] + torch.arange(1, draft_tokens + 1, device=position.device)
    inside = label < length
    at_label = loss_mask.gather(1, label.clamp(max=length - 1).flatten(1)).view_as(label)
    return (keep[..., None] & inside & at_label).long().cumprod(-1).bool()


def draw_anchors(loss_mask: torch.Tensor, count: int, draft_tokens: int, generator: torch.Generator) -> Anchors:
    """At most `count` legal anchors per row, uniformly without replacement, ascending.

    loss_mask [B,T] bool on the CPU; rows with fewer legal anchors are padded with position 0 and keep False.
    """
    legal = legal_anchors(loss_mask)
    rank = torch.rand(legal.shape, generator=generator).masked_fill(~legal, -1.0)
    count = min(count, legal.shape[1])
    best = rank.topk(count, dim=1)
    position = best.indices.masked_fill(best.values < 0, legal.shape[1])  # behind all real ones when sorted
    position = position.sort(dim=1).values
    keep = position < legal.shape[1]
    position = position.masked_fill(~keep, 0)
    return Anchors(position, keep, slot_mask(loss_mask, position, keep, draft_tokens))
