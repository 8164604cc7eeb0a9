"""The drafter's context cache and its walk, against the training-style forward."""

from __future__ import annotations

import pytest
import torch

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.drafter import Texts
from specgraft.drafters.precision import at_precision, precision
from specgraft.drafters.shared import Shared
from specgraft.ops.sampling import Law, uniforms

F64 = torch.float64


@pytest.fixture
def models(tiny_target, tiny_drafter):
    target = tiny_target(dtype=F64)
    return target, tiny_drafter(target, taps=(0, 2))


def taps_of(target, ids, taps=(0, 2)):
    return target.forward(torch.tensor([ids]), target.cache(1, len(ids)), taps).taps


def texts_of(ids, taps):
    """ids [1,T] and taps [1,T,K,D] as one document."""
    return Texts(ids, taps, torch.zeros_like(ids))


def following(ids):
    """[1,T+1]: the tokens at the new positions and one behind them."""
    return torch.tensor([[*ids, 0]])


def test_cache_grown_in_ragged_pieces_equals_one_built_from_scratch(models):
    target, drafter = models
    texts = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (11, 7, 13)]
    taps = [taps_of(target, ids)[0] for ids in texts]
    shared = Shared.of(target, 0)
    cache = DraftCache(drafter, shared, 4, 20)
    rows = torch.tensor([0, 2, 3])
    done = [0, 0, 0]
    for counts in ([3, 1, 4], [1, 4, 2], [4, 1, 4], [3, 1, 3]):
        width = 5  # what lies behind a count is rejected and must leave no trace
        piece = torch.randn(3, width, *taps[0].shape[1:], dtype=F64)
        for row, count in enumerate(counts):
            piece[row, :count] = taps[row][done[row] : done[row] + count]
            done[row] += count
        cache.append(piece, torch.zeros(3, width + 1, dtype=torch.long), torch.tensor(counts), rows)
    assert done == [11, 7, 13] and cache.lengths.tolist() == [11, 0, 7, 13]
    for row, one in zip(rows.tolist(), taps, strict=True):
        whole = drafter.encode(shared, texts_of(torch.zeros(1, len(one), dtype=torch.long), one[None]))
        for (keys, values), (key, value) in zip(cache.layers, whole, strict=True):
            torch.testing.assert_close(keys[row, : len(one)], key[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(values[row, : len(one)], value[0], rtol=0, atol=1e-12)


def test_walk_equals_training_style_forward(models):
    target, drafter = models
    shared = Shared.of(target, 0)
    texts = [[5, 9, 33, 2, 17, 40], [8, 3, 21]]
    cache = DraftCache(drafter, shared, 2, 16)
    for row, ids in enumerate(texts):
        cache.append(taps_of(target, ids), following(ids), torch.tensor([len(ids) - 1]), torch.tensor([row]))
    anchors = torch.tensor([ids[-1] for ids in texts])
    law = Law(1.0)
    level = torch.stack([uniforms(0, str(row), 4) for row in range(2)])
    found = drafter.draft(shared, cache, torch.arange(2), anchors, [law, law], level)
    assert found.q is not None
    for row, ids in enumerate(texts):
        a = len(ids) - 1
        hidden = drafter(shared, texts_of(torch.tensor([ids]), taps_of(target, ids)), torch.tensor([[a]]))[0, 0]
        previous = torch.tensor([ids[a], *found.tokens[row, :-1].tolist()])
        embedded = drafter.markov_head.embed(previous)
        logits = hidden @ shared.head.T + embedded @ drafter.markov_head.markov_w2.weight.T
        torch.testing.assert_close(found.q[row], logits.softmax(-1).float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            found.confidence[row], drafter.confidence_head(hidden, embedded).float(), rtol=0, atol=1e-6
        )
        alone = drafter.draft(shared, cache, torch.tensor([row]), anchors[row : row + 1], [law], level[row : row + 1])
        assert alone.tokens[0].tolist() == found.tokens[row].tolist()


def test_greedy_rows_have_no_stored_law_and_mixed_rows_a_one_hot_one(models):
    target, drafter = models
    shared, ids = Shared.of(target, 0), [5, 9, 33]
    cache = DraftCache(drafter, shared, 2, 16)
    cache.append(taps_of(target, ids).expand(2, -1, -1, -1), following(ids).expand(2, -1), torch.tensor([3, 3]), torch.arange(2))
    anchors = torch.tensor([7, 7])
    greedy = drafter.draft(shared, cache, torch.arange(2), anchors, [Law(), Law()])
    assert greedy.q is None
    mixed = drafter.draft(shared, cache, torch.arange(2), anchors, [Law(), Law(1.0)], torch.rand(2, 4, dtype=F64))
    assert mixed.q is not None
    assert mixed.tokens[0].tolist() == greedy.tokens[0].tolist()
    assert mixed.q[0].sum().item() == 4 and mixed.q[0].gather(-1, mixed.tokens[0][:, None]).tolist() == [[1.0]] * 4


def test_a_full_cache_is_refused_by_name(models):
    target, drafter = models
    cache, ids = DraftCache(drafter, Shared.of(target, 0), 1, 4), [5, 9, 33, 2, 17]
    with pytest.raises(ValueError, match="needs 5 draft cache places"):
        cache.append(taps_of(target, ids), following(ids), torch.tensor([5]), torch.tensor([0]))


def test_half_precision_matrices_propose_what_float32_does(tiny_target, tiny_drafter):
    target = tiny_target()
    taps = taps_of(target, [5, 9, 33, 2])
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = at_precision(tiny_drafter(target, taps=(0, 2)), dtype)
        assert drafter.norm.weight.dtype == drafter.confidence_head.proj.weight.dtype == torch.float32
        shared = Shared.of(target, 0)
        cache = DraftCache(drafter, shared, 1, 8)
        cache.append(taps.to(dtype), following([5, 9, 33, 2]), torch.tensor([4]), torch.tensor([0]))
        with precision(drafter):
            found.append(drafter.draft(shared, cache, torch.tensor([0]), torch.tensor([17]), [Law()]))
    torch.testing.assert_close(found[0].confidence, found[1].confidence, rtol=0.05, atol=0.05)
