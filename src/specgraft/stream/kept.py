"""Features made once and kept: made at first use, written as shards, read back in later epochs and later runs.

A later run finds its rows where `capture` would have put them, so the medium "disk" reads them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from specgraft.records import Conversation, Features
from specgraft.stream.live import LiveSource
from specgraft.stream.parcels import Parcel, shard_tensors, unpacked
from specgraft.stream.shards import ShardReader, ShardWriter


class KeptSource:
    """A live source in front of the run's shards (`stream.source`). Several ranks may keep into one folder."""

    def __init__(self, live: LiveSource, folder: Path, split: str, header: Mapping[str, Any], shard_tokens: int) -> None:
        """Raises ValueError when the folder holds features made otherwise, or of other answers."""
        self.live, self.folder, self.split, self.shard_tokens = live, folder, split, shard_tokens
        self.header = dict(header)
        self.writer = ShardWriter(folder, self.header)
        self.reader: ShardReader | None = None
        self.places: dict[str, int] = {}  # of rows that are on disk, in the reader
        self._look()

    def _look(self) -> None:
        """Opens what is on disk now; shards that were read once are not compared with their checksums again."""
        keep = {name: self.live.digests[name] for name in self.live.ids}
        if not any(row["prompt_id"] in keep for shard in self.writer.read() if shard["split"] == self.split for row in shard["rows"]):
            return
        before = self.reader
        self.reader = ShardReader(self.folder, self.split, self.header, keep, self.live.bad.policy)
        self.reader.take_over(before)
        self.places = {name: place for place, name in enumerate(self.reader.ids)}

    @property
    def ids(self) -> list[str]:
        return self.live.ids

    @property
    def lengths(self) -> list[int]:
        return self.live.lengths

    def digest(self) -> str:
        return self.live.digest()

    def rows(self, order: Iterable[int]) -> Iterator[Features | None]:
        """As `stream.source.Source.rows`. Raises ValueError when the disk refuses a shard."""
        wanted, names, fresh = list(order), self.live.ids, list[int]()
        if any(names[index] not in self.places for index in wanted):
            self._look()
        asked: set[int] = set()
        for index in wanted:
            if index not in asked and names[index] not in self.places:
                fresh.append(index)
            asked.add(index)
        waiting: dict[str, tuple[Conversation, Parcel | None]] = {}  # made and not written yet
        new = set(fresh)
        with closing(self.live.parcels(fresh)) as made:  # type: ignore[type-var]
            try:
                for index in wanted:
                    name = names[index]
                    if index in new:
                        new.discard(index)
                        waiting[name] = next(made)
                        if sum(len(row.input_ids) for row, _ in waiting.values()) >= self.shard_tokens:
                            self._write(waiting)
                    if name in waiting:
                        row, found = waiting[name]
                        yield None if found is None else unpacked(found, row, self.live.dtype)
                    else:
                        yield from self._read(name)
            finally:
                self._write(waiting)

    def _read(self, name: str) -> Iterator[Features | None]:
        if name not in self.places:
            self._look()
        if name not in self.places:  # it was bad when it was made
            yield None
            return
        assert self.reader is not None
        yield from self.reader.rows([self.places[name]])

    def _write(self, waiting: dict[str, tuple[Conversation, Parcel | None]]) -> None:
        """What waits becomes a shard, but for rows that another rank has kept meanwhile."""
        kept = self.writer.digests_now()
        rows = [(row, found) for row, found in waiting.values() if found is not None and row.prompt_id not in kept]
        if rows:
            own = [(row.prompt_id, shard_tensors(found, row)) for row, found in rows]
            self.writer.add_coded(self.split, own, [self.live.digests[row.prompt_id] for row, _ in rows])
        bad = {name for name, (_, found) in waiting.items() if found is None}
        for name in [name for name in waiting if name not in bad]:
            del waiting[name]

    def facts(self) -> dict[str, float]:
        found = self.live.facts()
        if self.reader is not None:
            mine = self.reader.facts()
            found["wait_seconds"] += mine["wait_seconds"]
            found["skipped"] += mine["skipped"]
        return found
