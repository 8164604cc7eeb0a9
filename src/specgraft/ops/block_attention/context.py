"""Attention of blocks over the shared context, piece by piece: forward, and backward from scores computed again.

Memory is that of one piece, whatever the number of blocks. Formulas of flash attention (2205.14135, 2307.08691).
Legend: M = B*Hk matrices (B rows, Hk key/value heads), L = N*g*S lines (N blocks, g = H // Hk query heads of a key head,
S slots a block; in this order), T context tokens, d head size. Keys carry the factor d**-0.5.
"""

from __future__ import annotations

import torch

from specgraft.ops.block_attention.pieces import Piece
from specgraft.ops.block_attention.spans import Spans


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, slots: int, pieces: list[Piece]
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [M,L,d], key and value [M,T,d] -> output [M,L,d] and the scores' log-sum-exp [M,L].

    A line that sees nothing gets the lowest finite number for a log-sum-exp, and some finite output.
    """
    out = torch.zeros_like(query)
    lse = torch.full_like(query[..., 0], torch.finfo(query.dtype).min)
    for piece in pieces:
        at, seen = places(piece, spans, query, key)
        scores = piece_scores(query[at], key[seen], piece, spans, slots)
        top = scores.amax(-1)
        weights = torch.softmax(scores, -1)
        lse[at] = top - weights.amax(-1).log()  # the largest weight is exp(top - lse); a pass of exp would cost more
        torch.bmm(weights, value[seen], out=out[at])
    return out, lse


def backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    inner: torch.Tensor,
    share: torch.Tensor,
    spans: Spans,
    slots: int,
    pieces: list[Piece],
    grad_query: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value; the query's is added to grad_query in place.

    grad [M,L,d] and inner [M,L] = grad . out belong to the joint output of context and block; share [M,L] is the
    context's part of the softmax: d loss / d score = share * weight * (grad . value - inner).
    """
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for piece in pieces:
        at, seen = places(piece, spans, query, key)
        weights = torch.softmax(piece_scores(query[at], key[seen], piece, spans, slots), -1)
        part = share[at].unsqueeze(-1)
        upper = grad[at] * part
        grad_value[seen].baddbmm_(weights.mT, upper)
        push = torch.bmm(upper, value[seen].mT).sub_(inner[at].unsqueeze(-1) * part).mul_(weights)
        grad_key[seen].baddbmm_(push.mT, query[at])
        grad_query[at].baddbmm_(push, key[seen])
    return grad_key, grad_value


def places(
    piece: Piece, spans: Spans, query: torch.Tensor, key: torch.Tensor
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Where a piece lies in [M,L,..] and in [M,T,..]."""
    batch, blocks = spans.end.shape
    heads, each = query.shape[0] // batch, query.shape[1] // blocks
    matrices = slice(piece.row * heads, piece.row_end * heads)
    return (matrices, slice(piece.block * each, piece.block_end * each)), (matrices, slice(piece.low, piece.high))


def piece_scores(query: torch.Tensor, key: torch.Tensor, piece: Piece, spans: Spans, slots: int) -> torch.Tensor:
    """Scores of a piece's lines and tokens; the lowest finite number where a slot does not see a token."""
    scores = torch.bmm(query, key.mT)
    for low, high in piece.strips():
        inside = (slice(piece.row, piece.row_end), slice(piece.block, piece.block_end))
        part = Spans(spans.first[inside], spans.end[inside], spans.causal, spans.window)
        token = torch.arange(low, high, device=scores.device)
        # without a window the slots of a block see the same: [rows, blocks, S or 1, high - low]
        hidden = (token < part.lowest(slots if spans.window else 1)[..., None]) | (token >= part.end[..., None, None])
        rows, blocks = part.end.shape
        by_slot = scores.view(rows, -1, blocks, scores.shape[1] // (blocks * slots), slots, scores.shape[2])
        strip = by_slot[..., low - piece.low : high - piece.low]
        strip.masked_fill_(hidden[:, None, :, None], torch.finfo(scores.dtype).min)
    return scores
