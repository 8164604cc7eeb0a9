"""Several conversations in one row: where each lies.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Which conversations lie in each row, back to back in this order. Filled by `pack`."""

    rows: tuple[tuple[int, ...], ...]  # indices of conversations
    lengths: tuple[int, ...]  # tokens of every conversation, those that lie in no row included

    @property
    def width(self) -> int:
        """T: tokens of the longest row."""
        return max(sum(self.lengths[index] for index in row) for row in self.rows)

    def fill(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B,T,..] of one tensor [tokens,..] per conversation; 0 behind the last of a row."""
        out = pieces[0].new_zeros((len(self.rows), self.width, *pieces[0].shape[1:]))
        for row, members in enumerate(self.rows):
            first = 0
            for index in members:
                out[row, first : first + self.lengths[index]] = pieces[index]
                first += self.lengths[index]
        return out

    def starts(self) -> torch.Tensor:
        """[B,T] where in the row the document of each token starts; the padding is a document of its own."""
        out = torch.empty(len(self.rows), self.width, dtype=torch.long)
        for row, members in enumerate(self.rows):
            first = 0
            for index in members:
                out[row, first : first + self.lengths[index]] = first
                first += self.lengths[index]
            out[row, first:] = first
        return out


def pack(lengths: Sequence[int], row_tokens: int, leave_out: frozenset[int] = frozenset()) -> Layout:
    """Conversations in as few rows of at most `row_tokens` tokens as hold them; 0: one row each.

    Longest first into the row with the fewest tokens, over one row more until all fit: the rows are padded to one
    width, so equal ones pad least. No conversation is split. Within a row, and over the rows, their order is kept.
    """
    members = [index for index in range(len(lengths)) if index not in leave_out]
    if not row_tokens:
        return Layout(tuple((index,) for index in members), tuple(lengths))
    assert max(lengths[index] for index in members) <= row_tokens, "a conversation is longer than a row"
    by_length = sorted(members, key=lambda index: -lengths[index])
    count = -(-sum(lengths[index] for index in members) // row_tokens)
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for index in by_length:
            row = filled.index(min(filled))
            rows[row].append(index)
            filled[row] += lengths[index]
        if max(filled) <= row_tokens:
            return Layout(tuple(sorted(tuple(sorted(row)) for row in rows)), tuple(lengths))
        count += 1
