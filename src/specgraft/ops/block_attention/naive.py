"""Definition of block attention: one dense mask over context and all blocks (algorithms.md 2.4; DFlash, DeepSpec).

Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import torch

from specgraft.ops.block_attention.spans import Spans


def mask(spans: Spans, slots: int, length: int) -> torch.Tensor:
    """[B, N*S, T + N*S] bool: keys (context, then the slots of all blocks) that every slot sees."""
    batch, blocks = spans.end.shape
    rows = blocks * slots
    owner = torch.arange(rows, device=spans.end.device) // slots
    own_block = (owner[:, None] == owner[None, :]) & spans.block_mask(slots).repeat(blocks, blocks)
    return torch.cat([spans.context_mask(slots, length).flatten(1, 2), own_block.expand(batch, rows, rows)], 2)


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    spans: Spans,
) -> torch.Tensor:
    """Every slot sees the context tokens in its span and slots of its own block, nothing else.

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d].
    Returns [B,N,S,H,d].
    """
    _, blocks, slots, heads, size = query.shape
    repeats = heads // context_key.shape[2]
    keys = torch.cat([context_key, block_key.flatten(1, 2)], 1).repeat_interleave(repeats, 2)
    values = torch.cat([context_value, block_value.flatten(1, 2)], 1).repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.flatten(1, 2), keys) * size**-0.5
    hidden = ~mask(spans, slots, context_key.shape[1])
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values).unflatten(1, (blocks, slots))
