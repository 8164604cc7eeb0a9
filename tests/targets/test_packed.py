"""A packed pass: rows with different numbers of new tokens end to end, against the same rows one by one."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("counts", [[1, 4, 2], [3, 1, 1], [2, 2, 2], [5, 1, 3]])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2, 3]])
def test_packed_is_each_row_alone(tiny_target, counts, rows):
    target = tiny_target()
    source = torch.Generator().manual_seed(1)
    lengths = [7, 3, 11, 5]
    prompt = torch.randint(2, 64, (4, 12), generator=source)
    packed, plain = target.cache(4, 24), target.cache(4, 24)
    for cache in (packed, plain):
        target.forward(prompt, cache)
        cache.lengths += torch.tensor(lengths)
    new = [torch.randint(2, 64, (count,), generator=source) for count in counts]
    step = target.forward_packed(torch.cat(new), torch.tensor(counts), packed, [0, 2], torch.tensor(rows))
    assert step.last.shape[:2] == (1, sum(counts)) and step.taps.shape[:3] == (1, sum(counts), 2)
    start = 0
    for row, count, ids in zip(rows, counts, new, strict=True):
        alone = target.forward(ids[None], plain, [0, 2], rows=torch.tensor([row]))
        torch.testing.assert_close(step.last[:, start : start + count], alone.last, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step.taps[:, start : start + count], alone.taps, rtol=1e-5, atol=1e-5)
        start += count
    for cache in (packed, plain):
        cache.lengths[rows] += torch.tensor(counts)
    after = torch.randint(2, 64, (4, 2), generator=source)
    torch.testing.assert_close(target.forward(after, packed).last, target.forward(after, plain).last, rtol=1e-5, atol=1e-5)


def test_a_full_row_is_refused(tiny_target):
    target = tiny_target()
    cache = target.cache(2, 4)
    with pytest.raises(ValueError, match="5 cache places and the cache has 4"):
        target.forward_packed(torch.ones(6, dtype=torch.long), torch.tensor([1, 5]), cache, (), torch.tensor([0, 1]))
