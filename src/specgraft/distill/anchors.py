"""Where blocks start, and which of their slots are supervised (algorithms.md 2.2, DeepSpec's rule, per document; 3.8 for branches).

Documents of a row lie back to back; `starts` says where the document of each token starts.
Legend: B rows, T tokens, N anchors a row, G draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Anchors:
    """Anchors of one step. Filled by `draw_anchors`, `choose_anchors` or `branch_anchors`."""

    position: torch.Tensor  # [B, N] a, index in the row, ascending; 0 where not kept
    keep: torch.Tensor  # [B, N] bool
    mask: torch.Tensor  # [B, N, G] bool: slot j-1 (label at a+j) is supervised

    def to(self, device: torch.device) -> Anchors:
        return Anchors(self.position.to(device), self.keep.to(device), self.mask.to(device))


def legal_anchors(loss_mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[B,T] bool: token a and the next one of its document are both supervised, as decoding never drafts inside a prompt."""
    legal = torch.zeros_like(loss_mask)
    legal[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:] & (starts[:, :-1] == starts[:, 1:])
    return legal


def slot_mask(
    loss_mask: torch.Tensor, starts: torch.Tensor, position: torch.Tensor, keep: torch.Tensor, draft_tokens: int
) -> torch.Tensor:
    """[B,N,G] bool: the supervised prefix of every block inside its document, read at the label's position a+j."""
    length = loss_mask.shape[1]
    label = position[..., None] + torch.arange(1, draft_tokens + 1, device=position.device)
    at = label.clamp(max=length - 1).flatten(1)
    supervised = loss_mask.gather(1, at).view_as(label) & (label < length)
    same = starts.gather(1, at).view_as(label) == starts.gather(1, position)[..., None]
    return (keep[..., None] & supervised & same).long().cumprod(-1).bool()


def choose_anchors(
    rank: torch.Tensor,
    loss_mask: torch.Tensor,
    starts: torch.Tensor,
    count: int,
    draft_tokens: int,
    quota: Literal["document", "row"] = "document",
) -> Anchors:
    """The `count` legal anchors of highest rank [B,T] (in [0,1)) of every document, or of every row; ascending.

    N is the most that a row keeps, at least 1. A document's anchors hang on its own ranks and mask alone: not on its place, nor on what shares its row.
    """
    position, keep = choose_places(rank, legal_anchors(loss_mask, starts), starts, count, quota)
    return Anchors(position, keep, slot_mask(loss_mask, starts, position, keep, draft_tokens))


def choose_places(
    rank: torch.Tensor, legal: torch.Tensor, starts: torch.Tensor, count: int, quota: Literal["document", "row"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position [B,N] and keep [B,N] of the `count` legal [B,T] tokens of highest rank, as `choose_anchors`."""
    length = legal.shape[1]
    token = torch.arange(length, device=starts.device)
    group = starts if quota == "document" else torch.zeros_like(starts)
    order = rank.masked_fill(~legal, -1.0).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))  # groups where they were, best first in each
    chosen = torch.zeros_like(legal).scatter(1, order, legal.gather(1, order) & (token - group < count))
    width = max(1, int(chosen.sum(1).max()))
    position = torch.where(chosen, token, length).sort(1).values[:, :width]
    keep = position < length
    return position.masked_fill(~keep, 0), keep


def branch_points(input_ids: torch.Tensor, loss_mask: torch.Tensor, end_ids: Sequence[int]) -> torch.Tensor:
    """[B,T] bool: the target's own tokens that end nothing. What follows in the text does not matter to a branch."""
    return loss_mask & ~torch.isin(input_ids, torch.tensor(end_ids, dtype=torch.long, device=input_ids.device))


def branch_anchors(
    rank: torch.Tensor,
    points: torch.Tensor,
    starts: torch.Tensor,
    count: int,
    draft_tokens: int,
    quota: Literal["document", "row"] = "document",
) -> Anchors:
    """As `choose_anchors`, among points [B,T] (`branch_points`): every slot of a branch exists, also behind the text's end."""
    position, keep = choose_places(rank, points, starts, count, quota)
    return Anchors(position, keep, keep[..., None].expand(-1, -1, draft_tokens).clone())


def draw_anchors(
    loss_mask: torch.Tensor,
    starts: torch.Tensor,
    count: int,
    draft_tokens: int,
    generator: torch.Generator,
    quota: Literal["document", "row"] = "document",
) -> Anchors:
    """At most `count` legal anchors of every document (or row), uniformly without replacement; padded by 0, keep False.

    loss_mask [B,T] bool and starts [B,T] on the CPU. A quota of the row starves short documents beside long ones.
    """
    return choose_anchors(torch.rand(loss_mask.shape, generator=generator), loss_mask, starts, count, draft_tokens, quota)
