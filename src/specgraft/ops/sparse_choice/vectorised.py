"""Block choice of sparse attention (QSA) for all queries at once. Same choice as `naive`, ties included.

Branches: the blocks before the anchor's are the stem's, shared by all; those from the anchor's on are rebuilt per branch,
of what is left of the stem and of the branch's own tokens (targets.md 3.2). The caller pools, norms and turns the keys.
Legend: R rows, N branches, W queries of one row or branch, H heads of the chooser, d its head size, S stem tokens,
M blocks, r tokens a block, G = ceil((r-1+W) / r) blocks that a branch can touch.
"""

from __future__ import annotations

import math

import torch

BUDGET = 2**22  # scores at a time (16 MB in float32), whatever the number of heads


@torch.no_grad()
def choose_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    ratio: int,
    topk: int,
    width: int,
    budget: int = BUDGET,
) -> torch.Tensor:
    """The tokens that queries of plain texts may read: their topk best complete blocks and the open one.

    q [R,W,H,d] roped queries; keys [R,M,d] finished keys of blocks 0..M-1, M at least max(lengths) // ratio; lengths
    [R,W] tokens visible to each query, itself included. Scores in float32 (float64 when given that). Returns [R,W,width]
    bool.
    """
    rows, queries = lengths.shape
    blocks = keys.shape[1]
    place = torch.arange(width, device=q.device)
    reads = torch.empty(rows, queries, width, dtype=torch.bool, device=q.device)
    step = max(1, budget // max(1, rows * blocks))
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        seen = lengths[:, part, None]
        complete = torch.arange(blocks, device=q.device) < seen // ratio  # [R,c,M]
        chosen = complete
        if blocks > topk:
            chosen = _best(_scores(q[:, part], keys).masked_fill_(~complete, -torch.inf), topk)
        is_open = (place >= seen // ratio * ratio) & (place < seen)
        reads[:, part] = _spread(chosen, ratio, width) | is_open
    return reads


def own_groups(
    stem_raw: torch.Tensor, branch_raw: torch.Tensor, anchors: torch.Tensor, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of each branch from its anchor's open one on.

    stem_raw [S,d] and branch_raw [N,W,d] raw keys; anchors [N]. Returns raw keys [N,G,r,d], zeros behind the branch's
    last token, and the position of each block's first token [N,G].
    """
    branches, width, size = branch_raw.shape
    first, left = _border(anchors, ratio)
    count = _touched(ratio, width)
    slot = torch.arange(count * ratio, device=anchors.device)  # slot s of a branch is position first + s
    from_stem = stem_raw[(first[:, None] + slot).clamp_max(stem_raw.shape[0] - 1)]
    token = slot - left[:, None]
    # width 0 has nothing to gather: its slots are all of the stem or empty
    padded = torch.cat([branch_raw, branch_raw.new_zeros(branches, 1, size)], 1)
    from_branch = padded.gather(1, token.clamp(0, width)[..., None].expand(-1, -1, size))
    raw = torch.where((token < 0)[..., None], from_stem, from_branch)
    starts = first[:, None] + torch.arange(count, device=anchors.device) * ratio
    return raw.view(branches, count, ratio, size), starts


@torch.no_grad()
def choose_branches(
    q: torch.Tensor,
    stem_keys: torch.Tensor,
    own_keys: torch.Tensor,
    anchors: torch.Tensor,
    ratio: int,
    topk: int,
    stem_width: int,
    budget: int = BUDGET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that the nodes of branches may read, as if [stem up to the anchor | branch] were the whole text.

    q [N,W,H,d] queries roped at their positions in the text; stem_keys [M,d] finished keys of the stem's blocks, M at
    least (max(anchors) + 1) // ratio; own_keys [N,G,d] finished keys of `own_groups`; anchors [N]; stem_width S tokens of
    the stem. Returns bool [N,W,S] over the stem and [N,W,W] over the branch's own tokens.
    """
    branches, width = q.shape[:2]
    blocks, count = stem_keys.shape[0], own_keys.shape[1]
    device = q.device
    on_stem = torch.empty(branches, width, stem_width, dtype=torch.bool, device=device)
    on_own = torch.empty(branches, width, width, dtype=torch.bool, device=device)
    place, node = torch.arange(stem_width, device=device), torch.arange(width, device=device)
    index, slot = torch.arange(count, device=device), torch.arange(count * ratio, device=device)
    step = max(1, budget // max(1, width * (blocks + count)))
    for begin in range(0, branches if width else 0, step):
        part = slice(begin, min(begin + step, branches))
        first, left = _border(anchors[part], ratio)
        seen = left[:, None, None] + node[:, None] + 1  # [c,W,1] tokens from `first` on that each node sees
        shared = torch.arange(blocks, device=device) < (first // ratio)[:, None, None]
        # candidates in the order of the text (hidden ones apart): ties break as they do in a plain row
        complete = torch.cat([shared.expand(-1, width, -1), (index + 1) * ratio <= seen], -1)  # [c,W,M+G]
        chosen = complete
        if blocks + count > topk:
            on_shared = _scores(q[part].flatten(0, 1), stem_keys).unflatten(0, (-1, width))
            scores = torch.cat([on_shared, _scores(q[part], own_keys[part])], -1)
            chosen = _best(scores.masked_fill_(~complete, -torch.inf), topk)
        is_open = (slot >= seen // ratio * ratio) & (slot < seen)
        own = _spread(chosen[..., blocks:], ratio, count * ratio) | is_open  # [c,W,G*r] by slot
        on_own[part] = own.gather(2, (left[:, None, None] + node).expand(-1, width, -1))
        # what is left of the stem behind its shared blocks goes with own block 0
        behind = (place >= first[:, None, None]) & (place < (first + left)[:, None, None])
        on_stem[part] = _spread(chosen[..., :blocks], ratio, stem_width) | (behind & own[..., :1])
    return on_stem, on_own


def _border(anchors: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First position behind the shared blocks, and how many stem tokens are left from there up to the anchor; [N] each."""
    left = (anchors + 1) % ratio
    return anchors + 1 - left, left


def _touched(ratio: int, width: int) -> int:
    return -(-(ratio - 1 + width) // ratio)


def _scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [..,W,H,d], keys [..,M,d] -> [..,W,M]. Head by head: no [..,H,M], and the same order of sums on every path."""
    work = torch.promote_types(q.dtype, torch.float32)
    turned = keys.to(work).mT
    heads = q.to(work).unbind(-2)
    total = torch.matmul(heads[0], turned).relu_()
    for head in heads[1:]:
        total += torch.matmul(head, turned).relu_()
    return total.div_(math.sqrt(q.shape[-1]))


def _best(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """[..,M] bool: the topk highest scores above -inf; of those equal to the last one chosen, the lowest indices."""
    least = scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)  # a value, so the same for every kernel
    above, level = scores > least, scores == least
    chosen = above | (level & (level.cumsum(-1, dtype=torch.int32) <= topk - above.sum(-1, keepdim=True)))
    return chosen & (scores > -torch.inf)


def _spread(chosen: torch.Tensor, ratio: int, width: int) -> torch.Tensor:
    """[..,M] bool of blocks -> [..,width] bool of tokens; no block, no token."""
    tokens = chosen.repeat_interleave(ratio, -1)[..., :width]
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[-1]))
