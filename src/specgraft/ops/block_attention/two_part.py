"""Block attention in two parts: scores against the shared context, scores within each block, one softmax over both.

No key or value is repeated, and blocks never meet. Same values as `naive.block_attention`.
Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, g = H // Hk, d head size.
"""

from __future__ import annotations

import torch

from specgraft.ops.block_attention.spans import Spans


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """As `naive.block_attention`; computed in float32 (or float64 when given that), returned in the query's dtype.

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d].
    Returns [B,N,S,H,d].
    """
    kind = query.dtype
    work = torch.float64 if kind == torch.float64 else torch.float32
    batch, blocks, slots, heads, size = query.shape
    key_heads, length = context_key.shape[2], context_key.shape[1]
    group = heads // key_heads
    # [B, Hk, N, g*S, d]: the query heads that share a key head are rows of one product
    rows = (query.to(work) * size**-0.5).view(batch, blocks, slots, key_heads, group, size)
    rows = rows.permute(0, 3, 1, 4, 2, 5).reshape(batch, key_heads, blocks, group * slots, size)
    near_key = block_key.to(work).permute(0, 3, 1, 2, 4)  # [B, Hk, N, S, d]
    near_value = block_value.to(work).permute(0, 3, 1, 2, 4)
    far_key = context_key.to(work).permute(0, 2, 3, 1)  # [B, Hk, d, T]
    far_value = context_value.to(work).permute(0, 2, 1, 3)  # [B, Hk, T, d]
    far_hidden = ~spans.context_mask(slots, length).repeat(1, 1, group, 1)[:, None]  # [B, 1, N, g*S, T]
    near_hidden = ~spans.block_mask(slots).repeat(group, 1)  # [g*S, S]
    far = (rows.flatten(2, 3) @ far_key).view(batch, key_heads, blocks, group * slots, length)
    near = rows @ near_key.transpose(-1, -2)
    hide = float("-inf")
    weights = torch.cat([far.masked_fill(far_hidden, hide), near.masked_fill(near_hidden, hide)], -1).softmax(-1)
    far_weights, near_weights = weights.split([length, slots], -1)
    out = (far_weights.reshape(batch, key_heads, blocks * group * slots, length) @ far_value).view_as(rows)
    out = out + near_weights @ near_value
    out = out.view(batch, key_heads, blocks, group, slots, size).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, blocks, slots, heads, size).to(kind)
