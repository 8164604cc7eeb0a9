"""Which conversations share a forward pass, and which share a shard.

Rows are put together by length over a window of many shards, so that little of a pass is padding; what a shard holds is whole
batches. A window that is broken off goes on with the same batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

MOST_PADDING = 0.05  # of a batch; rows that are longer or shorter than its others wait for the next
WINDOW_SHARDS = 16  # longer windows make shards of one length each, of no use to who reads them in order


def by_length(lengths: Sequence[int], batch_tokens: int, most_padding: float = MOST_PADDING) -> Iterator[list[int]]:
    """Indices grouped so that rows of similar length meet: longest first, the padded size within `batch_tokens` (one row at
    least), and no more than `most_padding` of it padding."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batch: list[int] = []
    tokens = 0
    for index in order:
        padded = lengths[batch[0]] * (len(batch) + 1) if batch else 0
        if batch and (padded > batch_tokens or padded - tokens - lengths[index] > most_padding * padded):
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def in_order(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices in the given order, cut whenever `limit` is reached (one at least)."""
    part: list[int] = []
    size = 0
    for index, own in enumerate(sizes):
        if part and size + own > limit:
            yield part
            part, size = [], 0
        part.append(index)
        size += own
    if part:
        yield part


def shards_of(lengths: Sequence[int], missing: Collection[int], batch_tokens: int, shard_tokens: int) -> Iterator[list[list[int]]]:
    """The batches of every shard, of the indices in `missing`; the windows are those of all rows, whatever is there already."""
    for window in in_order(lengths, WINDOW_SHARDS * shard_tokens):
        rows = [index for index in window if index in missing]
        batches = [[rows[place] for place in batch] for batch in by_length([lengths[i] for i in rows], min(batch_tokens, shard_tokens))]
        for shard in in_order([sum(lengths[index] for index in batch) for batch in batches], shard_tokens):
            yield [batches[number] for number in shard]


def padded_tokens(lengths: Sequence[int], batch: Sequence[int]) -> int:
    """Places of the forward pass of a batch, padding included."""
    return max(lengths[index] for index in batch) * len(batch)
