"""Attention of a pass over keys that a mask hides or shows, grouped query heads, attention sinks.

Legend: R rows, T queries a row, S keys a row, H query heads, Hk key/value heads, g = H // Hk, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from specgraft.targets.parts import Heads


def causal_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[T, T] bool: a token sees itself and those before it, with a window only the last `window` of them."""
    every = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return every.triu(1 - window) if window else every


def biases(hidden: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """What `attend_masked` adds to its scores, [R,1,g*T,S]: -inf where hidden [R,T,S]. Layers of one pass may share it."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return bias[:, None].repeat(1, 1, group, 1)


def attend_masked(heads: Heads, mask: torch.Tensor) -> torch.Tensor:
    """query [R,T,H,d] over key and value [R,S,Hk,d] under mask [R,T,S] (bool: visible) or its `biases` -> [R,T,H,dv].

    The g query heads that share a key head become g*T rows of one head, so that nothing is copied g times. A sink is one
    more key, a zero vector whose value is zero, with the sink's logit as its bias.
    """
    query, key, value, scale, _, sinks = heads
    rows, width, count, size = query.shape
    key_heads = key.shape[2]
    group = count // key_heads
    if mask.dtype == torch.bool:
        mask = biases(~mask, group, query.dtype)
    if sinks is not None:
        bias = sinks.to(query.dtype).view(key_heads, group, 1).expand(-1, -1, width).reshape(1, key_heads, -1, 1)
        mask = torch.cat([mask.expand(rows, key_heads, -1, -1), bias.expand(rows, -1, -1, -1)], -1)
        key, value = F.pad(key, (0, 0, 0, 0, 0, 1)), F.pad(value, (0, 0, 0, 0, 0, 1))
    lines = query.transpose(1, 2).reshape(rows, key_heads, group * width, size)
    out = F.scaled_dot_product_attention(lines, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.reshape(rows, count, width, value.shape[-1]).transpose(1, 2)
