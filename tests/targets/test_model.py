"""The target's forward with its cache of ragged rows, against transformers' plain forward of every row alone."""

from __future__ import annotations

import pytest
import torch

from specgraft.targets.model import Target
from specgraft.targets.slots import RowsPart, SlotCache

TOLERANCE = 1e-4  # of states of size 1 to 10; transformers computes norms and softmax in float32 whatever the dtype is
KINDS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
TAPS = [0, 2, 3]


def texts(*lengths: int, seed: int = 0, vocab: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> torch.Tensor:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, text in enumerate(rows):
        ids[row, : len(text)] = torch.tensor(text)
    return ids


@KINDS
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_taps_last_and_logits_equal_independent_hooks(tiny_target, oracle, dtype, kv_heads) -> None:
    target = tiny_target(layers=4, kv_heads=kv_heads, dtype=dtype, markov=2.0, spread=0.2)
    (text,) = texts(23)
    step = target.forward(torch.tensor([text]), target.cache(1, 23), TAPS)
    plain = oracle(target).run(text)
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    for place, tap in enumerate(TAPS):
        torch.testing.assert_close(step.taps[0, :, place], plain.layers[tap], **close)
        for other in range(4):
            if other != tap:
                assert not torch.allclose(step.taps[0, :, place], plain.layers[other], rtol=0.01, atol=0.01)
    torch.testing.assert_close(step.last[0], plain.layers[3], **close)
    torch.testing.assert_close(target.logits(step.last)[0], plain.logits.float(), **close)


def test_the_last_layer_is_taken_before_the_final_norm(tiny_target, oracle) -> None:
    target = tiny_target(layers=4)
    (text,) = texts(12)
    step = target.forward(torch.tensor([text]), target.cache(1, 12), [3])
    behind = oracle(target).run(text).last_hidden
    assert torch.equal(step.taps[:, :, 0], step.last)
    assert not torch.allclose(step.last[0], behind, rtol=0.01, atol=0.01)
    torch.testing.assert_close(target.final_norm(step.last[0]), behind, rtol=TOLERANCE, atol=TOLERANCE)


@KINDS
def test_ragged_rows_equal_each_row_alone_through_prefill_steps_and_dropped_drafts(tiny_target, oracle, dtype) -> None:
    """Prefill of unequal prompts, then passes of width 1, 4 and 2 of which every row keeps another number of tokens."""
    target = tiny_target(layers=4, dtype=dtype, markov=2.0, spread=0.2)
    reference = oracle(target)
    rows = texts(3, 9, 6)
    cache = target.cache(3, 32)
    step = target.forward(padded(rows), cache, TAPS)
    cache.lengths += torch.tensor([len(row) for row in rows])
    states = [step.last[row, : len(text)] for row, text in enumerate(rows)]
    generator = torch.Generator().manual_seed(1)
    for width, kept in ((1, (1, 1, 1)), (4, (2, 4, 1)), (2, (1, 2, 2)), (4, (4, 3, 4))):
        new = torch.randint(0, 64, (3, width), generator=generator)
        step = target.forward(new, cache, TAPS)
        cache.lengths += torch.tensor(kept)
        for row, count in enumerate(kept):
            rows[row] += new[row, :count].tolist()
            states[row] = torch.cat([states[row], step.last[row, :count]])
    assert cache.lengths.tolist() == [len(row) for row in rows] == [11, 19, 14]
    for text, state in zip(rows, states, strict=True):
        torch.testing.assert_close(state, reference.run(text).layers[3], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("chosen", [[1], [0, 2], [2]])
def test_a_pass_over_some_rows_equals_each_row_alone_and_leaves_the_others(tiny_target, oracle, chosen) -> None:
    target = tiny_target(layers=4, markov=2.0, spread=0.2)
    rows = texts(3, 9, 6)
    cache = target.cache(3, 32)
    target.forward(padded(rows), cache)
    cache.lengths += torch.tensor([3, 9, 6])
    index = torch.tensor(chosen)
    new = torch.tensor([[5, 6]]).expand(len(chosen), 2)
    step = target.forward(new, cache, TAPS, rows=index)
    cache.lengths[index] += 2
    reference = oracle(target)
    for place, row in enumerate(chosen):
        rows[row] += [5, 6]
        torch.testing.assert_close(step.last[place], reference.run(rows[row]).layers[3][-2:], rtol=TOLERANCE, atol=TOLERANCE)
    step = target.forward(torch.tensor([[7], [8], [9]]), cache)
    for row, token in enumerate((7, 8, 9)):
        expected = reference.run([*rows[row], token]).layers[3][-1]
        torch.testing.assert_close(step.last[row, 0], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_row_given_to_another_text_keeps_nothing_of_the_old_one(tiny_target, oracle) -> None:
    target = tiny_target(layers=4, markov=2.0, spread=0.2)
    old, new, beside = texts(20, 6, 11)
    cache = target.cache(2, 24)
    target.forward(padded([old, beside]), cache)
    cache.lengths += torch.tensor([20, 11])
    index = torch.tensor([0])
    cache.lengths[index] = 0
    step = target.forward(torch.tensor([new]), cache, rows=index)
    cache.lengths[index] = 6
    reference = oracle(target)
    torch.testing.assert_close(step.last[0], reference.run(new).layers[3], rtol=TOLERANCE, atol=TOLERANCE)
    step = target.forward(torch.tensor([[4], [4]]), cache)
    for row, text in enumerate((new, beside)):
        torch.testing.assert_close(step.last[row, 0], reference.run([*text, 4]).layers[3][-1], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_full_row_is_refused(tiny_target) -> None:
    target = tiny_target()
    cache = target.cache(2, 8)
    cache.lengths += torch.tensor([3, 7])
    with pytest.raises(ValueError, match="needs 9 cache places and the cache has 8"):
        target.forward(torch.zeros(2, 2, dtype=torch.long), cache)


def test_positions_and_places_of_ragged_rows() -> None:
    cache = SlotCache(2, 8, torch.device("cpu"))
    cache.lengths += torch.tensor([1, 3])
    work = cache.begin(torch.zeros(2, 2, dtype=torch.long))
    assert work.positions.tolist() == [[1, 2], [3, 4]]
    assert isinstance(work.parts[0], RowsPart) and work.parts[0].reach == 5


@pytest.mark.parametrize("tap", [-1, 3, 40])
def test_a_layer_that_does_not_exist_is_refused(tiny_target, tap) -> None:
    target = tiny_target(layers=3)
    with pytest.raises(ValueError, match=f"tap {tap}: the target's decoder layers are 0 to 2"):
        target.forward(torch.tensor([[1]]), target.cache(1, 4), [0, tap])


def test_nothing_of_the_target_can_be_trained(tiny_target) -> None:
    target: Target = tiny_target()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
