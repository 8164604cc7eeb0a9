"""The source of a split by `stream.medium`: who makes the rows is the caller's, how they come is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specgraft.config import RunConfig
from specgraft.records import Conversation
from specgraft.run_dir import RunDir
from specgraft.stream.kept import KeptSource
from specgraft.stream.live import Counts, LiveSource, Make
from specgraft.stream.shards import ShardReader
from specgraft.stream.source import Source


def open_source(
    config: RunConfig, run: RunDir, header: Mapping[str, Any], conversations: Sequence[Conversation], split: str,
    keep: Mapping[str, str], make: Make | None = None, counts: Counts | None = None,
) -> Source:  # fmt: skip
    """`conversations`: rows as capture sees them, of any split; `keep`: digests of the split's rows by id, in their order; `make`: who
    makes rows, of every medium but "disk".

    Raises ValueError where there is nothing of this split, or where what is on disk is of another target or other answers.
    """
    part = config.stream
    if part.medium == "disk":
        return ShardReader(run.features, split, dict(header), keep, part.bad_rows)
    assert make is not None, f"stream.medium={part.medium!r} needs somebody who makes the rows"
    mine = {row.prompt_id: row for row in conversations if row.split == split}
    rows = [mine[name] for name in keep if name in mine]
    live = LiveSource(rows, keep, header, make, counts or Counts(), part.group, part.bad_rows)
    if part.medium == "hybrid" or part.keep:
        return KeptSource(live, run.features, split, header, config.capture.shard_tokens)
    return live
