"""A key/value cache whose rows have lengths of their own.

Every row writes at its own length, so prompts need no padding mask, a finished row can be given to the next prompt,
and rejected drafts are dropped by counting back: stale entries lie behind the length and are overwritten.
Legend: B rows, W new tokens per row, S slots, H key/value heads, d head size, N tokens of a packed pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Packing:
    """Where token n of a packed pass belongs. Filled by `SlotCache.pack`."""

    rows: torch.Tensor  # [N] cache row
    places: torch.Tensor  # [N] 0, 1, .. within the new tokens of its row
    width: int  # most new tokens of one row
    batch: int  # rows of the cache


class _SlotLayer(CacheLayerMixin):
    """One layer of `SlotCache`; storage [B,S,H,d]."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.owner.rows, self.owner.slots, key_states.shape[1])
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        own = self.owner
        assert self.keys is not None and self.values is not None
        if own.single is not None:  # one row: a plain slice, no index arithmetic
            row, start, stop = own.single
            self.keys[row, start:stop] = key_states[0].transpose(0, 1)
            self.values[row, start:stop] = value_states[0].transpose(0, 1)
            return self.keys[row : row + 1, :stop].transpose(1, 2), self.values[row : row + 1, :stop].transpose(1, 2)
        self.keys[own.row_index[:, None], own.positions] = key_states.transpose(1, 2)
        self.values[own.row_index[:, None], own.positions] = value_states.transpose(1, 2)
        keys, values = self.keys[:, : own.reach], self.values[:, : own.reach]
        if not own.all_rows:
            keys, values = keys[own.row_index], values[own.row_index]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.reach, 0

    def get_seq_length(self) -> int:
        return int(self.owner.lengths.max())

    def get_max_length(self) -> int:
        return self.owner.slots


class SlotCache(Cache):
    """Key/value cache of `rows` sequences with `slots` places each, any Hugging Face attention layer can write to it.

    `lengths` [B] counts what is committed. `begin` announces the next forward pass; afterwards the caller moves
    `lengths` on by as many tokens as it keeps.
    """

    def __init__(self, layers: int, rows: int, slots: int, device: torch.device) -> None:
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])
        self.rows, self.slots, self.device_ = rows, slots, device
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.row_index = torch.arange(rows, device=device)
        self.positions = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.reach = 0
        self.all_rows = True
        self.single: tuple[int, int, int] | None = None

    def begin(self, width: int, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Places `width` new tokens behind the length of each chosen row.

        Returns positions [b,W] and an additive float32 mask [b,1,W,reach] (0 visible, -inf hidden): token i of a row
        sees what that row has committed and the new tokens up to itself. Raises ValueError when a row is full.
        """
        self.all_rows = rows is None
        self.row_index = torch.arange(self.rows, device=self.device_) if rows is None else rows
        lengths = self.lengths[self.row_index]
        self.positions = lengths[:, None] + torch.arange(width, device=self.device_)
        self.reach = int(lengths.max()) + width
        if self.reach > self.slots:
            raise ValueError(f"a sequence needs {self.reach} cache places and the cache has {self.slots}")
        self.single = None
        if len(self.row_index) == 1:
            row = int(self.row_index[0])
            self.single = (row, self.reach - width, self.reach)
        return self.positions, self._mask(self.positions)

    def pack(self, counts: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Packing]:
        """As `begin`, for counts[b] >= 1 new tokens of each row rows[b], laid end to end in one sequence of N tokens.

        Returns positions [1,N], the mask [rows of the cache,1,W,reach] that attention needs once its queries are spread
        over the rows again, and how to spread them. Raises ValueError when a row is full.
        """
        width, number = int(counts.max()), torch.arange(int(counts.sum()), device=self.device_)
        owner = torch.repeat_interleave(torch.arange(len(rows), device=self.device_), counts)
        packing = Packing(rows[owner], number - (counts.cumsum(0) - counts)[owner], width, self.rows)
        self.all_rows, self.single = True, None
        self.row_index = packing.rows[None]
        self.positions = (self.lengths[packing.rows] + packing.places)[None]
        self.reach = int(self.positions.max()) + 1
        if self.reach > self.slots:
            raise ValueError(f"a sequence needs {self.reach} cache places and the cache has {self.slots}")
        return self.positions, self._mask(self.lengths[:, None] + torch.arange(width, device=self.device_)), packing

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Additive mask [b,1,W,reach] of tokens at positions [b,W]."""
        hidden = torch.arange(self.reach, device=self.device_)[None, None, :] > positions[:, :, None]
        return torch.zeros(hidden.shape, device=self.device_).masked_fill_(hidden, float("-inf"))[:, None]
