"""Which rows are worked on together: slots of one source share its target logits (and its Markov bias).

Legend: R rows (slots), C rows of one chunk, S sources of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """At most `chunk` slots of S sources, in layers: layer k holds the k-th slot of the first widths[k] sources.

    So the sources of a layer are a prefix of the chunk's, and p of a layer is a view.
    """

    sources: torch.Tensor  # [S] their keys, most slots first
    rows: torch.Tensor  # [C] slots, layer after layer
    widths: tuple[int, ...]  # slots of each layer; descending, widths[0] = S, sum = C

    def layers(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[C, ...] in the order of `rows` -> one view a layer."""
        return rows.split(self.widths)

    def blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Up to `size` slots of one layer: their places in `rows` and in `sources`."""
        offset = 0
        for width in self.widths:
            for first in range(0, width, size):
                last = min(first + size, width)
                yield slice(offset + first, offset + last), slice(first, last)
            offset += width


def chunks(key: torch.Tensor, chunk: int) -> Iterator[Chunk]:
    """Every slot once; key [R] is the source of each slot. A source of more than `chunk` slots comes more than once."""
    if key.numel() == 0:
        return
    order = key.argsort(stable=True)
    _, counts = key[order].unique_consecutive(return_counts=True)
    pieces = [
        (start + skip, min(chunk, count - skip))
        for start, count in zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True)
        for skip in range(0, count, chunk)
    ]
    pieces.sort(key=lambda piece: -piece[1])
    while pieces:
        taken, room = 0, chunk
        while taken < len(pieces) and pieces[taken][1] <= room:
            room -= pieces[taken][1]
            taken += 1
        mine, pieces = pieces[:taken], pieces[taken:]
        layers = [[start + k for start, count in mine if count > k] for k in range(mine[0][1])]
        rows = order[torch.tensor([slot for layer in layers for slot in layer], device=key.device)]
        yield Chunk(key[rows[:taken]], rows, tuple(len(layer) for layer in layers))
