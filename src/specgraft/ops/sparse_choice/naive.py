"""Definition of the block choice of sparse attention (QSA: `Qwen4ExpTextQSAIndexer` in transformers; targets.md 3.1, 3.2).

The tokens that a query sees, in the order of the text, are cut into blocks of r. A block's key is made of the mean of its
raw keys and of the position of its first token. score_j = sum_h relu(q_h . key_j) / sqrt(d); of equal scores the earlier
block wins. A query reads the best complete blocks that it sees, and always the open one.
Legend: R rows, N branches, W queries of one row or branch, H heads of the chooser, d its head size, n visible tokens,
S stem tokens, T tokens of a row, r tokens a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Finish = Callable[[torch.Tensor, int], torch.Tensor]  # mean raw key [d], position of the block's first token -> key [d]


def pool(raw: torch.Tensor) -> torch.Tensor:
    """[..,r,d] raw keys of blocks -> [..,d] their mean, taken in float32 (float64 when given that), in the dtype of raw."""
    return raw.to(torch.promote_types(raw.dtype, torch.float32)).mean(-2).to(raw.dtype)


def choose(query: torch.Tensor, raw: torch.Tensor, ratio: int, topk: int, finish: Finish | None = None) -> torch.Tensor:
    """query [H,d] roped; raw [n,d] keys of the tokens that it sees, its own last -> [n] bool: those it may read."""
    work = torch.promote_types(query.dtype, torch.float32)
    blocks = len(raw) // ratio
    scores = []
    for block in range(blocks):
        key = pool(raw[block * ratio : (block + 1) * ratio])
        key = key if finish is None else finish(key, block * ratio)
        products = [torch.dot(head.to(work), key.to(work)).item() for head in query]
        scores.append(sum(max(p, 0.0) for p in products) / query.shape[-1] ** 0.5)
    chosen = sorted(range(blocks), key=lambda block: (-scores[block], block))[:topk]
    reads = torch.zeros(len(raw), dtype=torch.bool)
    reads[blocks * ratio :] = True
    for block in chosen:
        reads[block * ratio : (block + 1) * ratio] = True
    return reads


def choose_rows(
    q: torch.Tensor,
    raw: torch.Tensor,
    lengths: torch.Tensor,
    ratio: int,
    topk: int,
    width: int,
    finish: Finish | None = None,
) -> torch.Tensor:
    """q [R,W,H,d]; raw [R,T,d]; lengths [R,W] tokens visible to each query, itself included -> [R,W,width] bool."""
    rows, queries = lengths.shape
    reads = torch.zeros(rows, queries, width, dtype=torch.bool)
    for row in range(rows):
        for t in range(queries):
            seen = int(lengths[row, t])
            reads[row, t, :seen] = choose(q[row, t], raw[row, :seen], ratio, topk, finish)
    return reads


def choose_branches(
    q: torch.Tensor,
    stem_raw: torch.Tensor,
    branch_raw: torch.Tensor,
    anchors: torch.Tensor,
    ratio: int,
    topk: int,
    finish: Finish | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N,W,H,d]; stem_raw [S,d]; branch_raw [N,W,d]; anchors [N] -> bool [N,W,S] of the stem, [N,W,W] of the branch.

    Node (n, t) sees stem tokens 0..anchors[n] and tokens 0..t of its own branch, as if that were the whole text.
    """
    branches, width = branch_raw.shape[:2]
    on_stem = torch.zeros(branches, width, len(stem_raw), dtype=torch.bool)
    on_own = torch.zeros(branches, width, width, dtype=torch.bool)
    for n in range(branches):
        shared = int(anchors[n]) + 1
        for t in range(width):
            text = torch.cat([stem_raw[:shared], branch_raw[n, : t + 1]])
            reads = choose(q[n, t], text, ratio, topk, finish)
            on_stem[n, t, :shared], on_own[n, t, : t + 1] = reads[:shared], reads[shared:]
    return on_stem, on_own
