"""Definition of block attention: one dense mask over context and all blocks (algorithms.md 2.4; DFlash, DeepSpec).

Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import torch


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Every slot sees the visible context tokens of its block and all slots of its own block, nothing else.

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d]; visible [B,N,T] bool.
    Returns [B,N,S,H,d].
    """
    batch, blocks, slots, heads, size = query.shape
    repeats = heads // context_key.shape[2]
    rows = blocks * slots
    keys = torch.cat([context_key, block_key.flatten(1, 2)], 1).repeat_interleave(repeats, 2)
    values = torch.cat([context_value, block_value.flatten(1, 2)], 1).repeat_interleave(repeats, 2)
    owner = torch.arange(rows, device=query.device) // slots
    same_block = (owner[:, None] == owner[None, :]).expand(batch, rows, rows)
    mask = torch.cat([visible.repeat_interleave(slots, 1), same_block], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.flatten(1, 2), keys) * size**-0.5
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, values).unflatten(1, (blocks, slots))
