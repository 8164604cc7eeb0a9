"""Which conversations share a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices grouped so that rows of similar length meet and padded size stays within `batch_tokens` (one row at least)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batch: list[int] = []
    for index in order:
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def into_shards(lengths: Sequence[int], shard_tokens: int) -> Iterator[list[int]]:
    """Indices in the given order, cut whenever a shard is full (one conversation at least)."""
    shard: list[int] = []
    size = 0
    for index, length in enumerate(lengths):
        if shard and size + length > shard_tokens:
            yield shard
            shard, size = [], 0
        shard.append(index)
        size += length
    if shard:
        yield shard
