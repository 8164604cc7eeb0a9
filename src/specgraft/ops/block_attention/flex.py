"""Block attention by torch.nn.attention.flex_attention: one compiled kernel that skips hidden tiles (CUDA).

On a CPU it runs uncompiled, without a backward.
Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from specgraft.ops.block_attention.spans import Spans

TILE = 128


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
    _, blocks, slots, heads, _ = query.shape
    key = torch.cat([context_key.to(work), block_key.to(work).flatten(1, 2)], 1).transpose(1, 2)
    value = torch.cat([context_value.to(work), block_value.to(work).flatten(1, 2)], 1).transpose(1, 2)
    attend: Callable[..., Any] = compiled() if query.device.type == "cuda" else uncompiled
    out = attend(
        query.to(work).flatten(1, 2).transpose(1, 2),
        key,
        value,
        block_mask=tiles(spans, slots, context_key.shape[1]),
        enable_gqa=heads != key.shape[1],
    )
    return out.transpose(1, 2).unflatten(1, (blocks, slots)).to(query.dtype)


def uncompiled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """Without a backward, and without the advice to compile."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise ValueError("block attention: flex has no backward on this device; choose path two_part or sdpa")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(query.detach(), key.detach(), value.detach(), **options)


@functools.cache
def compiled() -> Callable[..., Any]:
    """One compiled kernel for every shape: anchors and lengths change from step to step."""
    attend: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return attend


def tiles(spans: Spans, slots: int, length: int) -> BlockMask:
    """Tile mask of [B, 1, N*S, T + N*S]; kept in spans.memo, as every layer of a step asks for the same one."""
    name = ("tiles", slots, length)
    if name not in spans.memo:
        batch, blocks = spans.end.shape
        rows = blocks * slots
        # the last tile reads past N*S: there the tables say "sees nothing"
        beyond = (0, -rows % TILE)
        lowest = F.pad(spans.lowest(slots).flatten(1), beyond)
        end = F.pad(spans.end.repeat_interleave(slots, 1), beyond)
        causal = spans.causal

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            near = kv - length
            context = (near < 0) & (kv >= lowest[b, q]) & (kv < end[b, q])
            own = (near >= 0) & (near // slots == q // slots)
            return context | (own & (near <= q) if causal else own)

        spans.memo[name] = create_block_mask(visible, batch, None, rows, length + rows, str(spans.end.device), TILE)
    mask: BlockMask = spans.memo[name]
    return mask
