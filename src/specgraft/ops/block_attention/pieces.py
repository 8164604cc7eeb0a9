"""Rectangles of rows and blocks, each with the stretch of context that some block in it can see.

Legend: B batch rows, N blocks, S slots a block, T context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.ops.block_attention.spans import Spans

AT_LEAST = 4  # blocks in a piece, budget or not: a product of few lines is slow


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows [row, row_end) x blocks [block, block_end); no block in it sees a token outside [low, high).

    hidden: where some slot does not see all: stretches [start, stop) of [low, high), counted from low, each with a mask
    [rows, 1, blocks, 1, S, stop - start] bool, True where hidden (S is 1 where the slots of a block see the same).
    """

    row: int
    row_end: int
    block: int
    block_end: int
    low: int
    high: int
    hidden: list[tuple[int, int, torch.Tensor]]


def cut(spans: Spans, slots: int, per_block: int, length: int, budget: int) -> list[Piece]:
    """Pieces that cover all blocks that see context, of at most `budget` scores (or AT_LEAST blocks).

    per_block: scores of a block with one context token. Kept in spans.memo: layers ask for the same pieces.
    """
    key = ("pieces", slots, per_block, length, budget)
    if key not in spans.memo:
        spans.memo[key] = _cut(spans, slots, per_block, length, budget)
    pieces: list[Piece] = spans.memo[key]
    return pieces


def _cut(spans: Spans, slots: int, per_block: int, length: int, budget: int) -> list[Piece]:
    """Blocks of one row are cut in their order, so sorted anchors let a piece leave out the context behind its last
    anchor (and, with a window or documents, before its first)."""
    batch, blocks = spans.end.shape
    whole = max(1, blocks * per_block * length)
    rows_a_piece = max(1, min(batch, budget // whole))
    blocks_a_piece = min(blocks, max(AT_LEAST, budget // max(1, per_block * length)))
    lowest = spans.lowest(slots if spans.window else 1)
    nearest, farthest, ends = lowest[..., 0].tolist(), lowest[..., -1].tolist(), spans.end.tolist()
    pieces: list[Piece] = []
    for row in range(0, batch, rows_a_piece):
        for block in range(0, blocks, blocks_a_piece):
            rows, columns = slice(row, row + rows_a_piece), slice(block, block + blocks_a_piece)
            near, far, end = ([n for r in table[rows] for n in r[columns]] for table in (nearest, farthest, ends))
            seeing = [(a, b) for a, b in zip(near, end, strict=True) if a < b]
            if not seeing:
                continue
            low, high = min(a for a, _ in seeing), min(length, max(b for _, b in seeing))
            left = min(high, max(low, *far))  # every slot sees [left, right)
            right = min(high, max(left, min(end)))
            hidden = []
            for start, stop in ((low, left), (right, high)):
                if start < stop:
                    token = torch.arange(start, stop, device=spans.end.device)
                    mask = (token < lowest[rows, columns, :, None]) | (token >= spans.end[rows, columns, None, None])
                    hidden.append((start - low, stop - low, mask[:, None, :, None]))
            at = (row, min(batch, row + rows_a_piece), block, min(blocks, block + blocks_a_piece))
            pieces.append(Piece(*at, low, high, hidden))
    return pieces
