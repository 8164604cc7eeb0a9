"""Block attention in two parts: over the shared context, in pieces (`context.py`), and within each block.

No key or value is repeated, and blocks never meet. Same values as `naive.block_attention`. The two parts, each normalised
over its own keys, become one softmax by their log-sum-exps: the context's share is sigmoid(lse_context - lse_block).
Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, g = H // Hk, d head size.
"""

from __future__ import annotations

from typing import Any

import torch

from specgraft.ops.block_attention.context import Context
from specgraft.ops.block_attention.pieces import cut
from specgraft.ops.block_attention.spans import Spans

BUDGET = 2**18  # context scores at a time, 1 MB in float32: the size of a second-level cache
KEEP = 6 * 2**20  # weights of the context that wait for backward, 24 MB a layer: a step is a sixth faster


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    spans: Spans,
    budget: int = BUDGET,
    keep: int = KEEP,
) -> torch.Tensor:
    """As `naive.block_attention`; computed in float32 (or float64 when given that), returned in the query's dtype.

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d].
    budget: context scores computed at a time (see pieces.cut); keep: up to so many weights wait for backward, above that
    it computes them again. Returns [B,N,S,H,d].
    """
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, blocks, slots, heads, size = query.shape
    key_heads = context_key.shape[2]
    group = heads // key_heads
    # the query heads that share a key head are lines of one product
    rows = query.to(work).view(batch, blocks, slots, key_heads, group, size).permute(0, 3, 1, 4, 2, 5)
    scale = size**-0.5
    out = TwoPart.apply(
        rows.reshape(batch * key_heads, blocks, group * slots, size),
        (context_key.to(work) * scale).transpose(1, 2).reshape(batch * key_heads, -1, size),
        context_value.to(work).transpose(1, 2).reshape(batch * key_heads, -1, size),
        (block_key.to(work) * scale).permute(0, 3, 1, 2, 4).reshape(batch * key_heads, blocks, slots, size),
        block_value.to(work).permute(0, 3, 1, 2, 4).reshape(batch * key_heads, blocks, slots, size),
        spans,
        budget,
        keep,
    )
    out = out.view(batch, key_heads, blocks, group, slots, size).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, blocks, slots, heads, size).to(query.dtype)


class TwoPart(torch.autograd.Function):
    """query [B*Hk,N,g*S,d], far key and value [B*Hk,T,d], near key and value [B*Hk,N,S,d] -> output like query."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        far_key: torch.Tensor,
        far_value: torch.Tensor,
        near_key: torch.Tensor,
        near_value: torch.Tensor,
        spans: Spans,
        budget: int,
        keep: int,
    ) -> torch.Tensor:
        key_heads, lines, slots = query.shape[0] // spans.end.shape[0], query.shape[2], near_key.shape[2]
        scores = query @ near_key.mT
        if spans.causal:
            scores.masked_fill_(~spans.block_mask(slots).repeat(lines // slots, 1), float("-inf"))
        weights, near_lse = scores.softmax(-1), scores.logsumexp(-1)
        out = weights @ near_value

        pieces = cut(spans, slots, key_heads * lines, far_key.shape[1], budget)
        ctx.pieces, ctx.layout = pieces, (key_heads, lines // slots, slots)
        held = sum((p.row_end - p.row) * (p.block_end - p.block) * (p.high - p.low) for p in pieces)
        wanted = any(ctx.needs_input_grad) and held * key_heads * lines <= keep
        context = Context(query.flatten(1, 2), far_key, far_value, pieces, ctx.layout)
        far, far_lse, kept = context.attend(keep=wanted)

        gap = far_lse.view_as(near_lse) - near_lse
        share = gap.sigmoid()
        out.lerp_(far.view_as(out), share[..., None])
        weights *= (-gap).sigmoid()[..., None]  # of the joint softmax
        ctx.save_for_backward(query, far_key, far_value, near_key, near_value, out, share, weights, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, far_key, far_value, near_key, near_value, out, share, weights, *kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        inner = (grad * out).sum(-1)
        push = (grad @ near_value.mT).sub_(inner[..., None]).mul_(weights)
        grad_query = push @ near_key
        grad_near = push.mT @ query, weights.mT @ grad
        context = Context(query.flatten(1, 2), far_key, far_value, ctx.pieces, ctx.layout)
        upper = grad.flatten(1, 2), inner.flatten(1), share.flatten(1)
        grad_far = context.gradients(*upper, kept, grad_query.flatten(1, 2))
        return grad_query, *grad_far, *grad_near, None, None, None
