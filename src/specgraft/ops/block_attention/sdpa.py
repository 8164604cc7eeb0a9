"""Block attention by torch.nn.functional.scaled_dot_product_attention with a boolean mask, some blocks at a time.

A call holds the keys of the context and of its own blocks only: a dense call for all N blocks would compute N * S keys a
slot, of which all but S are hidden.
Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from specgraft.ops.block_attention import naive
from specgraft.ops.block_attention.spans import Spans

AT_A_TIME = 32  # blocks a call


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """As `naive.block_attention`; returned in the query's dtype, computed in the widest of the five (softmax in float32).

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d].
    Returns [B,N,S,H,d].
    """
    work = torch.promote_types(query.dtype, torch.promote_types(context_key.dtype, block_key.dtype))
    slots, repeats = query.shape[2], query.shape[3] // context_key.shape[2]
    far_key, far_value = context_key.to(work), context_value.to(work)
    parts = []
    for at in range(0, query.shape[1], AT_A_TIME):
        these = slice(at, at + AT_A_TIME)
        rows = query[:, these].to(work).flatten(1, 2).transpose(1, 2)  # [B, H, n*S, d]
        key = torch.cat([far_key, block_key[:, these].to(work).flatten(1, 2)], 1).transpose(1, 2)
        value = torch.cat([far_value, block_value[:, these].to(work).flatten(1, 2)], 1).transpose(1, 2)
        own = Spans(spans.first[:, these], spans.end[:, these], spans.causal, spans.window)
        mask = naive.mask(own, slots, context_key.shape[1])[:, None]
        if repeats > 1 and query.device.type == "cuda":  # the CUDA kernel that takes a mask takes no grouped heads
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        grouped = key.shape[1] != rows.shape[1]
        out = scaled_dot_product_attention(rows, key, value, mask, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).unflatten(1, (-1, slots)))
    return torch.cat(parts, 1).to(query.dtype)
