"""Tree attention in two parts: over the stem for all nodes at once, and within each branch. Same values as `naive`.

No key is copied, branches never meet, and both parts share one softmax: a line of scores is [stem | own branch | sink].
A hidden key has weight exactly 0, so nothing that a node does not see moves it, not by one bit.
Legend: N branches, W nodes a branch, S stem tokens, H query heads, Hk key/value heads, g = H // Hk, d key size, dv value size.
"""

from __future__ import annotations

import torch

BUDGET = 2**18  # scores at a time on a CPU, 1 MB in float32: the size of a second-level cache
DEVICE_BUDGET = 2**26  # on an accelerator: few, large products


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
    budget: int | None = None,
) -> torch.Tensor:
    """As `naive.tree_attention`; computed in float32 (float64 when given that), returned in the query's dtype.

    budget: scores held at a time, in whole branches of one key head (default by device). For inference: raises ValueError
    where a gradient is asked for. Returns [N,W,H,dv].
    """
    inputs = (query, stem_key, stem_value, own_key, own_value, sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError("tree attention has no gradient: call it under torch.no_grad() or torch.inference_mode()")
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    branches, width, heads, size = query.shape
    stem, key_heads, value_size = stem_value.shape
    group = heads // key_heads
    lines, columns = group * width, stem + width + (sinks is not None)
    if budget is None:
        budget = BUDGET if query.device.type == "cpu" else DEVICE_BUDGET
    step = max(1, min(branches, budget // max(1, lines * columns)))

    # the query heads that share a key head are lines of one product: [Hk, N, g*W, d]
    rows = (query.to(work) * scale).view(branches, width, key_heads, group, size).permute(2, 0, 3, 1, 4)
    rows = rows.reshape(key_heads, branches, lines, size)
    keys, values = stem_key.to(work).permute(1, 2, 0), stem_value.to(work).transpose(0, 1)  # [Hk,d,S] [Hk,S,dv]
    near_keys, near_values = own_key.to(work).permute(2, 0, 3, 1), own_value.to(work).permute(2, 0, 1, 3)
    hidden = torch.cat([stem_mask, own_mask], -1).logical_not_()[:, None]  # [N,1,W,S+W]
    bounded = query.device.type == "cpu" and _bounded(rows, keys, near_keys)
    out = rows.new_empty(key_heads, branches, lines, value_size)
    room = rows.new_empty(step * lines, columns)
    for first in range(0, branches, step):
        part = slice(first, min(first + step, branches))
        count = part.stop - first
        scores = room[: count * lines]  # [c*g*W, S+W (+1)], used again and again
        by_branch = scores.view(count, lines, columns)
        by_head = scores.view(count, group, width, columns)
        seen = by_head[..., : stem + width]
        limit = torch.where(hidden[part], -torch.inf, torch.inf).to(work) if bounded else None
        for head in range(key_heads):
            torch.mm(rows[head, part].flatten(0, 1), keys[head], out=scores[:, :stem])
            by_branch[..., stem : stem + width] = rows[head, part] @ near_keys[head, part]
            if limit is None:
                seen.masked_fill_(hidden[part], -torch.inf)
            else:  # ten times faster on a CPU, a quarter of the whole
                torch.minimum(seen, limit, out=seen)
            if sinks is not None:
                by_head[..., -1] = sinks[head * group : (head + 1) * group, None]
            torch.softmax(scores, -1, out=scores)
            found = out[head, part]
            torch.bmm(by_branch[..., stem : stem + width], near_values[head, part], out=found)
            found.flatten(0, 1).addmm_(scores[:, :stem], values[head])
    out = out.view(key_heads, branches, group, width, value_size).permute(1, 3, 0, 2, 4)
    return out.reshape(branches, width, heads, value_size).to(query.dtype)


def _bounded(rows: torch.Tensor, *keys: torch.Tensor) -> bool:
    """No product can overflow, hence no score is NaN, which a minimum would keep."""
    most = rows.abs().amax().item() * rows.shape[-1] if rows.numel() else 0.0
    return all(most * x.abs().amax().item() < torch.finfo(rows.dtype).max for x in keys if x.numel())
