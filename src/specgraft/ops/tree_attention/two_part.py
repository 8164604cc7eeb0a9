"""Tree attention in two parts: over the stem for all nodes at once, and within each branch. Same values as `naive`.

No key is copied, branches never meet, and both parts share one softmax: a line of scores is [own branch | sink | stem].
The stem is taken in tiles, those that no node of a chunk of branches reads are left out: half of a causal stem, most of
one behind a window. A hidden key has weight exactly 0 and tiles are added in order, so nothing that a node does not see
moves it, not by one bit; nor does what another branch sees.
Legend: N branches, W nodes a branch, S stem tokens, H query heads, Hk key/value heads, g = H // Hk, d key size, dv value
size, c branches of a chunk, P columns of a line ahead of the stem, U columns of the tiles in use.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

BUDGET = 2**19  # scores at a time on a CPU, 2 MB in float32: the size of a second-level cache
DEVICE_BUDGET = 2**26  # on an accelerator: few, large products
TILE = 256  # stem tokens
LANES = 16  # the stem starts at a whole vector, so that a sum does not depend on which tiles are left out


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

    budget: scores held at a time, in whole branches of one key head (default by device). Fastest with branches in the order
    of their anchors. For inference: raises ValueError where a gradient is asked for. Returns [N,W,H,dv].
    """
    inputs = (query, stem_key, stem_value, own_key, own_value, sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError("tree attention has no gradient: call it under torch.no_grad() or torch.inference_mode()")
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    on_cpu = query.device.type == "cpu"
    branches, width, heads, size = query.shape
    stem, key_heads, value_size = stem_value.shape
    group = heads // key_heads
    lines, ahead = group * width, -(-(width + (sinks is not None)) // LANES) * LANES
    if budget is None:
        budget = BUDGET if on_cpu else DEVICE_BUDGET
    step = max(1, min(branches, budget // max(1, lines * (ahead + stem))))

    # the query heads that share a key head are lines of one product: [Hk, N, g*W, d]
    rows = (query.to(work) * scale).view(branches, width, key_heads, group, size).permute(2, 0, 3, 1, 4)
    rows = rows.reshape(key_heads, branches, lines, size)
    keys, values = stem_key.to(work).permute(1, 2, 0), stem_value.to(work).transpose(0, 1)  # [Hk,d,S] [Hk,S,dv]
    near_keys, near_values = own_key.to(work).permute(2, 0, 3, 1), own_value.to(work).permute(2, 0, 1, 3)
    bounded = on_cpu and _bounded(rows, keys, near_keys)
    out = rows.new_empty(key_heads, branches, lines, value_size)
    room = rows.new_empty(step * lines * (ahead + stem))
    for first, tiles in zip(range(0, branches, step), _tiles(stem_mask, step, TILE if on_cpu else stem), strict=True):
        part = slice(first, min(first + step, branches))
        count = part.stop - first
        seen = _line(own_mask[part], ahead, sinks is not None, [stem_mask[part, :, tile] for tile in tiles])[:, None]
        end = seen.shape[-1]
        ends = list(accumulate((tile.stop - tile.start for tile in tiles), initial=ahead))
        places = [slice(low, high) for low, high in pairwise(ends)]  # the tiles' columns
        limit = torch.where(seen, torch.inf, -torch.inf).to(work) if bounded else None
        hidden = ~seen

        scores = room[: count * lines * end].view(count * lines, end)  # [c*g*W, P+U], used again and again
        by_branch, by_head = scores.view(count, lines, end), scores.view(count, group, width, end)
        for head in range(key_heads):
            by_branch[..., :width] = rows[head, part] @ near_keys[head, part]
            scores[:, width:ahead] = 0.0
            if sinks is not None:
                by_head[..., width] = sinks[head * group : (head + 1) * group, None]
            for tile, place in zip(tiles, places, strict=True):
                torch.mm(rows[head, part].flatten(0, 1), keys[head, :, tile], out=scores[:, place])
            if limit is None:
                by_head.masked_fill_(hidden, -torch.inf)
            else:  # ten times faster on a CPU, a quarter of the whole
                torch.minimum(by_head, limit, out=by_head)
            torch.softmax(scores, -1, out=scores)
            found = out[head, part]
            torch.bmm(by_branch[..., :width], near_values[head, part], out=found)
            for tile, place in zip(tiles, places, strict=True):
                found.flatten(0, 1).addmm_(scores[:, place], values[head, tile])
    out = out.view(key_heads, branches, group, width, value_size).permute(1, 3, 0, 2, 4)
    return out.reshape(branches, width, heads, value_size).to(query.dtype)


def _line(own_mask: torch.Tensor, ahead: int, sink: bool, stem_masks: list[torch.Tensor]) -> torch.Tensor:
    """[c,W,P+U] bool: own branch [c,W,W], the sink, nothing up to column `ahead`, then the tiles in use [c,W,..]."""
    width = own_mask.shape[2]
    between = own_mask.new_zeros(*own_mask.shape[:2], ahead - width)
    between[..., : int(sink)] = True
    return torch.cat([own_mask, between, *stem_masks], -1)


def _tiles(stem_mask: torch.Tensor, step: int, size: int) -> list[list[slice]]:
    """The tiles of the stem that a node of each chunk of `step` branches reads."""
    stem = stem_mask.shape[2]
    every = [slice(low, min(low + size, stem)) for low in range(0, stem, max(1, size))]
    starts = range(0, len(stem_mask), step)
    if len(every) < 2:  # nothing to leave out, and on an accelerator nothing to wait for
        return [every for _ in starts]
    read = torch.nn.functional.pad(stem_mask.any(1), (0, -stem % size)).unflatten(1, (-1, size)).any(2)
    return [[every[i] for i in read[n : n + step].any(0).nonzero().flatten().tolist()] for n in starts]


def _bounded(rows: torch.Tensor, *keys: torch.Tensor) -> bool:
    """No product can overflow, hence no score is NaN, which a minimum would keep."""
    most = rows.abs().amax().item() * rows.shape[-1] if rows.numel() else 0.0
    return all(most * x.abs().amax().item() < torch.finfo(rows.dtype).max for x in keys if x.numel())
