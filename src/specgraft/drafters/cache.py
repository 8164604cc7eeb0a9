"""What a drafter keeps between rounds, for many sequences of their own lengths.

Legend: b rows of a call, W new positions, K taps, D hidden size, T context tokens, Hk key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.drafters.drafter import Drafter
from specgraft.drafters.markov import BiasRows
from specgraft.drafters.precision import precision
from specgraft.drafters.shared import Shared


class DraftCache:
    """Context keys and values of a drafter for `rows` sequences of up to `slots` positions.

    `lengths` [rows] counts context positions. Row b of the target's cache and of this one hold the same sequence.
    What lies behind a length is stale and is overwritten. `bias` may be shared by caches of one drafter.
    """

    def __init__(self, drafter: Drafter, shared: Shared, rows: int, slots: int, bias: BiasRows | None = None) -> None:
        self.drafter, self.shared, self.rows, self.slots = drafter, shared, rows, slots
        self.bias = bias
        if bias is None and drafter.markov_head is not None:
            self.bias = BiasRows(drafter.markov_head)
        self.device = drafter.fc.weight.device
        self.lengths = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values [rows, slots, Hk, d]
        self.bound: int | None = None  # no row's context is longer, new positions included; whoever knows spares a device a wait
        self.extra: dict[str, torch.Tensor] = {}  # what else a kind keeps a row, [rows, ..]

    def reset(self, rows: torch.Tensor) -> None:
        """Empties rows that go to other sequences."""
        self.lengths[rows] = 0

    def append(self, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds the first counts[b] >= 1 positions of taps [b,W,K,D] behind row rows[b].

        tokens [b,W+1]: the tokens at these positions and the one behind each, so tokens[b, counts[b]] is the next anchor.
        Raises ValueError when a row is full.
        """
        with precision(self.drafter):
            self.drafter.advance(self.shared, self, taps.to(self.drafter.fc.weight.dtype), tokens, counts, rows)

    def places(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Positions [b,width] behind each row. Raises ValueError when a row is full."""
        positions = self.lengths[rows][:, None] + torch.arange(width, device=self.device)
        reach = int(positions.max()) + 1 if self.bound is None else self.bound
        if reach > self.slots:
            raise ValueError(f"a sequence needs {reach} draft cache places and the cache has {self.slots}")
        return positions

    def write(self, new: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Puts keys and values [b,W,Hk,d] of every layer at positions [b,W]; lengths stay."""
        if not self.layers:
            shape = (self.rows, self.slots, *new[0][0].shape[2:])
            self.layers = [(key.new_zeros(shape), value.new_zeros(shape)) for key, value in new]
        for (keys, values), (key, value) in zip(self.layers, new, strict=True):
            keys[rows[:, None], positions] = key
            values[rows[:, None], positions] = value

    def view(self, rows: torch.Tensor, more: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [b,T,Hk,d] a layer, up to the longest of these rows (or `bound`) plus `more`."""
        reach = (int(self.lengths[rows].max()) if self.bound is None else self.bound) + more
        if len(rows) == self.rows:  # rows are distinct and sorted: all of them
            return [(keys[:, :reach], values[:, :reach]) for keys, values in self.layers]
        if len(rows) == 1 and self.bound is None:  # a slice, no copy
            row = int(rows[0])
            return [(keys[row : row + 1, :reach], values[row : row + 1, :reach]) for keys, values in self.layers]
        return [(keys[rows, :reach], values[rows, :reach]) for keys, values in self.layers]
