"""Attention of the in-process target: grouped-query attention without repeating keys and values.

Legend: B batch, Hq query heads, Hk key/value heads, g = Hq // Hk, W new tokens, S cached tokens, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from specgraft.targets.slots import Packing

NAME = "specgraft"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face attention function: query [B,Hq,W,d], key and value [B,Hk,S,d], additive mask [B,1,W,S] -> [B,W,Hq,d].

    With `packing`, query is [1,Hq,N,d] and the result [1,N,Hq,d]: queries are spread over the rows of keys and values.
    The g query heads that share a key head become g*W rows of one head, so that nothing is copied g times.
    Sinks, soft caps and sliding windows are not handled: `targets.load` refuses models that have them.
    """
    assert attention_mask is not None and attention_mask.dim() == 4
    if packing is not None:
        spread = query.new_zeros(packing.batch, packing.width, query.shape[1], query.shape[3])
        spread[packing.rows, packing.places] = query[0].transpose(0, 1)
        out, _ = grouped_attention(module, spread.transpose(1, 2), key, value, attention_mask, scaling, dropout)
        return out[packing.rows, packing.places][None], None
    batch, query_heads, width, size = query.shape
    key_heads = key.shape[1]
    group = query_heads // key_heads
    rows = query.reshape(batch, key_heads, group * width, size)
    mask = attention_mask.to(query.dtype).repeat(1, 1, group, 1) if group > 1 else attention_mask.to(query.dtype)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, query_heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
