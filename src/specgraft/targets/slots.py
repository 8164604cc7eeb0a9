"""The rows of a decode loop: a cache whose rows have lengths of their own, whatever kinds of layers the target has.

Every row writes at its own length, so prompts need no padding mask, a finished row can be given to the next prompt, and
rejected drafts are dropped by counting back. Keys behind the length are stale and get overwritten. A recurrent state cannot be
counted back: the states before a pass are kept with the record of the pass (`Record`), and once the caller has said
how many of its tokens stay, the state behind them is taken from it; nothing runs again.
Legend: B rows of the cache, b rows of a pass, W new tokens per row, S slots, H key/value heads, d head size, N tokens of a packed pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import proxy

import torch

from specgraft.ops.gated_delta.chunked import Record
from specgraft.ops.sparse_choice.vectorised import choose_rows
from specgraft.targets.masked import attend_masked, biases
from specgraft.targets.parts import Chosen, Heads, Key, Part, SparseIndex, Work


class SlotCache:
    """Cache of `rows` sequences with `slots` places each.

    `lengths` [B] counts what is committed. `begin` or `pack` announces the next forward pass; afterwards the caller moves
    `lengths` on by as many tokens as it keeps. A row is given to another text by setting its length to 0.
    """

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.rows, self.slots, self.device = rows, slots, device
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stored: dict[Key, torch.Tensor] = {}  # [B, S, ..] one value a token
        self.tails: dict[Key, torch.Tensor] = {}  # [B, width, ..] the last values before each row's length
        self.states: dict[Key, torch.Tensor] = {}  # [B, H, dk, dv] at each row's length
        self.open: RowsPart | None = None  # the last pass; how much of it stays is known when the next one begins

    def begin(self, ids: torch.Tensor, rows: torch.Tensor | None = None) -> Work:
        """Places ids [b,W] behind the length of each chosen row, all by default: a token of a row sees what the row has
        committed and the new tokens up to itself. Raises ValueError when a row is full."""
        part = self._open(torch.arange(self.rows, device=self.device) if rows is None else rows, ids.shape[1], rows is None)
        return Work(ids, part.positions, [part], lambda x: [x], lambda pieces: pieces[0])

    def pack(self, ids: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> Work:
        """As `begin`, for ids [N]: counts[b] >= 1 new tokens of row rows[b], laid end to end; rows ascend. Raises ValueError when a row is full."""
        width = int(counts.max())
        owner = torch.repeat_interleave(torch.arange(len(rows), device=self.device), counts)
        place = torch.arange(len(ids), device=self.device) - (counts.cumsum(0) - counts)[owner]
        part = self._open(rows, width, len(rows) == self.rows, counts)  # rows ascend

        def split(x: torch.Tensor) -> list[torch.Tensor]:
            spread = x.new_zeros(len(rows), width, *x.shape[2:])
            spread[owner, place] = x[0]
            return [spread]

        def merge(pieces: list[torch.Tensor]) -> torch.Tensor:
            return pieces[0][owner, place][None]

        return Work(ids[None], part.positions[owner, place][None], [part], split, merge)

    def _open(self, rows: torch.Tensor, width: int, every: bool, counts: torch.Tensor | None = None) -> RowsPart:
        if self.open is not None:
            self.open.settle()
        lengths = self.lengths[rows]
        reach = int((lengths + (width if counts is None else counts)).max())
        if reach > self.slots:
            raise ValueError(f"a sequence needs {reach} cache places and the cache has {self.slots}")
        self.open = RowsPart(proxy(self), rows, lengths, width, reach, every, counts)
        return self.open

    def write(self, key: Key, values: torch.Tensor, part: RowsPart) -> torch.Tensor:
        """Stores values [b,W,..] at the part's places; returns what its rows hold up to the longest, [b,reach,..]."""
        if key not in self.stored:
            self.stored[key] = values.new_zeros(self.rows, self.slots, *values.shape[2:])
        store = self.stored[key]
        if part.only is not None:
            store[part.only, part.reach - part.width : part.reach] = values[0]
            return store[part.only : part.only + 1, : part.reach]
        if part.counts is None:
            store[part.rows[:, None], part.positions] = values
        else:
            row, place = part.real
            store[part.rows[row], part.positions[row, place]] = values[row, place]
        return store[:, : part.reach] if part.every else store[part.rows, : part.reach]


@dataclass
class RowsPart(Part):
    """New tokens [b, W] of rows of a `SlotCache`. With `counts` only the first counts[b] of a row are real."""

    cache: SlotCache  # a proxy: in a circle of references both would stay until garbage is collected, which is seldom
    rows: torch.Tensor  # [b]
    lengths: torch.Tensor  # [b] committed before this pass
    width: int
    reach: int  # places that the longest row holds with its new tokens
    every: bool  # rows are all rows of the cache, in order
    counts: torch.Tensor | None
    chosen: dict[int, Chosen] = field(default_factory=dict)
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # `biases` by window and queries a key head
    values: dict[Key, tuple[torch.Tensor, int]] = field(default_factory=dict)  # [b, width + W, ..] and width
    records: dict[Key, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = self.lengths[:, None] + torch.arange(self.width, device=self.rows.device)  # [b, W]
        # one row: a plain slice, no index arithmetic; asked once a pass, as a device must be waited for
        self.only = int(self.rows[0]) if len(self.rows) == 1 and self.counts is None else None
        if self.counts is not None:
            self.real = (torch.arange(self.width, device=self.rows.device) < self.counts[:, None]).nonzero(as_tuple=True)

    def before(self, key: Key, values: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        tails = self.cache.tails
        if key not in tails:
            tails[key] = values.new_full((self.cache.rows, width, *values.shape[2:]), fill)
        past = tails[key][self.rows]
        place = torch.arange(-width, 0, device=self.rows.device)
        empty = (self.lengths[:, None] + place < 0).view(len(past), width, *[1] * (past.dim() - 2))
        past = past.masked_fill(empty, fill)
        self.values[key] = torch.cat([past, values], 1), width
        return past

    def state(self, key: Key) -> torch.Tensor | None:
        if key not in self.cache.states:
            return None
        state = self.cache.states[key][self.rows]
        return state.masked_fill((self.lengths == 0)[:, None, None, None], 0)

    def keep(self, key: Key, record: Record) -> None:
        self.records[key] = record

    def settle(self) -> None:
        """The caller has moved the lengths on: takes what later passes need to know of these tokens."""
        kept = self.cache.lengths[self.rows] - self.lengths
        assert bool(((kept >= 0) | (self.cache.lengths[self.rows] == 0)).all()), "a row goes back by less than its last pass, or to 0"
        kept = kept.clamp(0, self.width)
        index = torch.arange(len(self.rows), device=self.rows.device)
        for key, (values, width) in self.values.items():
            place = kept[:, None] + torch.arange(width, device=self.rows.device)
            self.cache.tails[key][self.rows] = values[index[:, None], place]
        for key, record in self.records.items():
            state = record.after(index, kept)
            if key not in self.cache.states:
                self.cache.states[key] = state.new_zeros(self.cache.rows, *state.shape[1:])
            self.cache.states[key][self.rows] = state
        self.values, self.records = {}, {}

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        keys = self.cache.write((layer, "key"), heads.key, self)
        values = self.cache.write((layer, "value"), heads.value, self)
        mask = self.chosen.pop(layer).before if layer in self.chosen else self._biases(heads)
        return attend_masked(heads._replace(key=keys, value=values), mask)

    def _biases(self, heads: Heads) -> torch.Tensor:
        window, group = heads.window, heads.query.shape[2] // heads.key.shape[2]
        if (window, group) not in self.masks:  # made once a pass: a copy a layer is a fortieth of a token's time
            token, place = torch.arange(self.reach, device=self.rows.device), self.positions[..., None]
            hidden = token > place
            if window:
                hidden |= place - token >= window
            self.masks[window, group] = biases(hidden, group, heads.query.dtype)
        return self.masks[window, group]

    def choose(self, layer: int, query: torch.Tensor, raw: torch.Tensor, index: SparseIndex) -> Chosen:
        held = self.cache.write((layer, "raw"), raw, self)
        whole = self.reach // index.ratio * index.ratio
        groups = held[:, :whole].unflatten(1, (-1, index.ratio))
        first = torch.arange(0, whole, index.ratio, device=raw.device).expand(len(groups), -1)
        return Chosen(choose_rows(query, index.pool(groups, first), self.positions + 1, index.ratio, index.top, self.reach), None)
