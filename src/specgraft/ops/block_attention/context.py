"""Attention of blocks over the shared context, piece by piece.

Formulas of flash attention (2205.14135, 2307.08691), its tiles as large as a processor's cache.
Legend: M = B*Hk matrices (B rows, Hk key/value heads), L = N*g*S lines (N blocks, g = H // Hk query heads of a key head,
S slots a block; in this order), T context tokens, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.ops.block_attention.pieces import Piece


@dataclass(frozen=True, eq=False)
class Context:
    """What the context part is computed from; the blocks' own keys are no part of it."""

    query: torch.Tensor  # [M, L, d]
    key: torch.Tensor  # [M, T, d], with the factor d**-0.5
    value: torch.Tensor  # [M, T, d]
    pieces: list[Piece]
    layout: tuple[int, int, int]  # Hk, g, S

    def attend(self, keep: bool) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Output [M,L,d], the scores' log-sum-exp [M,L], and the weights of every piece if `keep`.

        A line that sees nothing gets the lowest finite number for a log-sum-exp, and some finite output.
        """
        out = torch.zeros_like(self.query)
        lse = torch.full_like(self.query[..., 0], torch.finfo(self.query.dtype).min)
        kept = []
        for piece in self.pieces:
            at, seen = self.places(piece)
            scores = self.scores(piece)
            top, weights = scores.amax(-1), scores.softmax(-1)
            lse[at] = top - weights.amax(-1).log()  # the largest weight is exp(top - lse): no further pass of exp
            torch.bmm(weights, self.value[seen], out=out[at])
            if keep:
                kept.append(weights)
        return out, lse, kept

    def gradients(
        self,
        grad: torch.Tensor,
        inner: torch.Tensor,
        share: torch.Tensor,
        kept: list[torch.Tensor],
        grad_query: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of key and value; the query's is added to grad_query [M,L,d] in place.

        grad [M,L,d] and inner [M,L] = grad . out are those of the joint output of context and block, share [M,L] the
        context's part of the joint softmax: d loss / d score = share * weight * (grad . value - inner).
        kept: weights from `attend`; without them they are computed again.
        """
        grad_key, grad_value = torch.zeros_like(self.key), torch.zeros_like(self.value)
        for number, piece in enumerate(self.pieces):
            at, seen = self.places(piece)
            weights = kept[number] if kept else self.scores(piece).softmax(-1)
            part = share[at].unsqueeze(-1)
            upper = grad[at] * part
            grad_value[seen].baddbmm_(weights.mT, upper)
            push = torch.bmm(upper, self.value[seen].mT).sub_(inner[at].unsqueeze(-1) * part).mul_(weights)
            grad_key[seen].baddbmm_(push.mT, self.query[at])
            grad_query[at].baddbmm_(push, self.key[seen])
        return grad_key, grad_value

    def places(self, piece: Piece) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Where a piece lies in [M,L,..] and in [M,T,..]."""
        heads, each = self.layout[0], self.layout[1] * self.layout[2]
        matrices = slice(piece.row * heads, piece.row_end * heads)
        return (matrices, slice(piece.block * each, piece.block_end * each)), (matrices, slice(piece.low, piece.high))

    def scores(self, piece: Piece) -> torch.Tensor:
        """Of a piece's lines and tokens; the lowest finite number where a slot does not see a token."""
        at, seen = self.places(piece)
        scores = torch.bmm(self.query[at], self.key[seen].mT)
        heads, group, slots = self.layout
        by_slot = scores.view(-1, heads, piece.block_end - piece.block, group, slots, scores.shape[2])
        for start, stop, mask in piece.hidden:
            by_slot[..., start:stop].masked_fill_(mask, torch.finfo(scores.dtype).min)
        return scores
