"""Rectangles of rows and blocks, each with the stretch of context that some block in it can see.

Legend: B batch rows, N blocks, S slots a block, T context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgraft.ops.block_attention.spans import Spans


@dataclass(frozen=True)
class Piece:
    """Rows [row, row_end) x blocks [block, block_end); no block in it sees a token outside [low, high).

    Every slot in it sees all of [left, right); masks are needed in [low, left) and [right, high) only.
    """

    row: int
    row_end: int
    block: int
    block_end: int
    low: int
    left: int
    right: int
    high: int

    def strips(self) -> list[tuple[int, int]]:
        """Stretches of context in which some slot does not see a token."""
        return [(a, b) for a, b in ((self.low, self.left), (self.right, self.high)) if a < b]


AT_LEAST = 4  # blocks in a piece, budget or not: a product of few lines is slow


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
    """Blocks of one row are cut in their order, so sorted anchors let a piece leave out the context behind its last anchor
    (and, with a window or documents, before its first).
    """
    batch, blocks = spans.end.shape
    whole = max(1, blocks * per_block * length)
    rows_a_piece = max(1, min(batch, budget // whole))
    blocks_a_piece = min(blocks, max(AT_LEAST, budget // max(1, per_block * length)))
    lowest = spans.lowest(slots)
    bounds = (lowest[..., 0].tolist(), lowest[..., -1].tolist(), spans.end.tolist())
    pieces: list[Piece] = []
    for row in range(0, batch, rows_a_piece):
        for block in range(0, blocks, blocks_a_piece):
            row_end, block_end = min(batch, row + rows_a_piece), min(blocks, block + blocks_a_piece)
            near, far, ends = ([n for r in table[row:row_end] for n in r[block:block_end]] for table in bounds)
            seeing = [(a, b) for a, b in zip(near, ends, strict=True) if a < b]
            if not seeing:
                continue
            low, high = min(a for a, _ in seeing), min(length, max(b for _, b in seeing))
            left = min(high, max(far))
            pieces.append(Piece(row, row_end, block, block_end, low, left, min(high, max(left, min(ends))), high))
    return pieces
