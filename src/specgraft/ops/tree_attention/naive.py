"""Definition of tree attention: one node at a time, one softmax over the keys it sees (sinks: `gpt_oss` in transformers).

Legend: N branches, W nodes a branch, S stem tokens, H query heads, Hk key/value heads, d key size, dv value size.
"""

from __future__ import annotations

import torch


def tree_attention(
    query: torch.Tensor,
    stem_key: torch.Tensor,
    stem_value: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    stem_mask: torch.Tensor,
    own_mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Node (n, t) sees the stem tokens in stem_mask[n, t] and the tokens of its own branch in own_mask[n, t].

    query [N,W,H,d]; stem_key [S,Hk,d]; stem_value [S,Hk,dv]; own_key [N,W,Hk,d]; own_value [N,W,Hk,dv]; stem_mask
    [N,W,S] and own_mask [N,W,W] bool; sinks [H]: a logit of each head that takes its share of the softmax and gives no
    value. Every node must see a key. Returns [N,W,H,dv].
    """
    branches, width, heads, _ = query.shape
    repeats = heads // stem_key.shape[1]
    out = query.new_zeros(branches, width, heads, stem_value.shape[-1])
    for n in range(branches):
        for t in range(width):
            keys = torch.cat([stem_key[stem_mask[n, t]], own_key[n, own_mask[n, t]]]).repeat_interleave(repeats, 1)
            values = torch.cat([stem_value[stem_mask[n, t]], own_value[n, own_mask[n, t]]])
            logits = torch.einsum("hd,khd->hk", query[n, t], keys) * scale
            if sinks is not None:
                logits = torch.cat([logits, sinks[:, None].to(logits)], 1)
            weights = logits.softmax(1)[:, : len(values)]
            out[n, t] = torch.einsum("hk,khd->hd", weights, values.repeat_interleave(repeats, 1))
    return out
