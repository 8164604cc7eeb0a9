"""Conversations of a step in rows: what is packed trains as what is not, and documents never see each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specgraft.config import DistillSection
from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.drafters.shared import Shared
from specgraft.records import Features
from specgraft.run_file import load_config
from specgraft.stream.shards import ShardReader
from specgraft.train.batch import collate, step_batches
from specgraft.train.packing import pack

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"kind": "dflash"},
    "mtp": {"kind": "mtp"},
    "dflash2": {"kind": "dflash2", "conv_group": 16, "selector_rank": 6, "selector_top_k": 8},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
}


def feature(length: int, prompt: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (length,), generator=generator)
    taps, last = (torch.randn(length, *size, 32, generator=generator, dtype=torch.float64) for size in ((3,), ()))
    return Features(f"p{seed}", ids, torch.arange(length) >= prompt, taps, last)


def batch_of(features: list[Features], row_tokens: int, anchors: int = 5, max_length: int = 64) -> Batch:
    return collate(features, anchors, 3, max_length, torch.Generator().manual_seed(3), CPU, row_tokens)


def documents(batch: Batch) -> dict[tuple[int, ...], list[Any]]:
    """By the ids of a document: its row, first token, anchors counted from there, and their slots."""
    found = {}
    for row, starts in enumerate(batch.texts.starts):
        for first in starts.unique().tolist():
            inside = starts == first
            mine = batch.anchors.keep[row] & inside[batch.anchors.position[row]]
            if mine.any():
                found[tuple(batch.texts.input_ids[row][inside].tolist())] = [
                    row, first, (batch.anchors.position[row][mine] - first).tolist(), batch.anchors.mask[row][mine].tolist(),
                ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def parts(tiny_target, tiny_drafter):
    """Random float64 weights, three drafts, by kind."""
    target = tiny_target(dtype=torch.float64, markov=1.0, spread=0.3)

    def make(name: str):
        more = {"rank": 6, **KINDS[name]}
        drafter = tiny_drafter(target, draft_tokens=3, layers=2, bigram=0.0, **more)
        generator = torch.Generator().manual_seed(7)
        for parameter in drafter.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return drafter.requires_grad_(True).train(), Shared.of(target, 0)

    return make


# layout


def test_rows_hold_every_conversation_once_whole_and_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        lengths = torch.randint(1, 60, (1 + trial % 17,), generator=generator).tolist()
        layout = pack(lengths, 64)
        assert sorted(index for row in layout.rows for index in row) == list(range(len(lengths)))
        assert all(list(row) == sorted(row) for row in layout.rows) and list(layout.rows) == sorted(layout.rows)
        assert layout.width <= 64 and -(-sum(lengths) // 64) <= len(layout.rows) <= len(lengths)
        assert layout == pack(lengths, 64)


def test_rows_are_as_few_as_fit_and_of_like_length() -> None:
    assert pack([5, 3, 2], 10).rows == ((0, 1, 2),)
    assert pack([5, 3, 2], 0).rows == ((0,), (1,), (2,))
    assert pack([40, 10, 20, 30], 60).rows == ((0, 1), (2, 3))  # 50 and 50, not 60 and 40
    assert pack([6, 6, 6], 11).rows == ((0,), (1,), (2,))
    assert pack([6, 6, 6], 12, frozenset({1})).rows == ((0, 2),)


def test_starts_and_positions_of_documents_of_1_3_and_2_tokens() -> None:
    layout = pack([1, 3, 2, 7], 7)
    assert layout.rows == ((0, 1, 2), (3,))
    assert layout.starts().tolist() == [[0, 1, 1, 1, 4, 4, 6], [0] * 7]
    texts = batch_of([feature(length, 0, length) for length in (1, 3, 2)], 64).texts
    assert texts.starts.tolist() == [[0, 0, 0, 3, 3]]  # one token holds no anchor: left out
    assert texts.positions.tolist() == [[0, 1, 2, 0, 1]]


# anchors


def test_packed_documents_have_the_anchors_they_have_in_rows_of_their_own() -> None:
    features = [feature(length, 3, seed) for seed, length in enumerate((9, 40, 12, 5, 23))]
    apart, packed = batch_of(features, 0), batch_of(features, 64)
    assert apart.texts.input_ids.shape == (5, 40) and packed.texts.input_ids.shape == (2, 45)
    mine, theirs = documents(apart), documents(packed)
    assert set(mine) == set(theirs) == {tuple(f.input_ids.tolist()) for f in features}
    for f in features:
        ids = tuple(f.input_ids.tolist())
        row, first, *found = theirs[ids]
        assert found == mine[ids][2:]
        part = slice(first, first + len(ids))
        assert torch.equal(packed.texts.taps[row, part], f.taps) and torch.equal(packed.last[row, part], f.last)


def test_what_is_cut_keeps_an_anchor_or_is_left_out() -> None:
    """At 12 tokens the answer behind a prompt of 11 has one token: nothing to learn."""
    features = [feature(20, 4, 0), feature(20, 11, 1), feature(20, 10, 2)]
    for row_tokens, shape in ((0, (2, 12)), (24, (1, 24))):
        batch = batch_of(features, row_tokens, anchors=30, max_length=12)
        assert batch.texts.input_ids.shape == shape
        assert sorted(value[2] for value in documents(batch).values()) == [list(range(4, 11)), [10]]
        assert int(batch.anchors.mask.sum()) == 5 * 3 + 2 + 1 + 1
    nothing = batch_of(features[1:2] * 2, 24, max_length=12)
    assert nothing.texts.input_ids.shape == (1, 12) and not nothing.anchors.keep.any()


# training


def steps(parts, name: str, features: list[Features], row_tokens: int, **more: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of a batch."""
    drafter, shared = parts(name)
    outcome = objective(drafter, shared, batch_of(features, row_tokens), DistillSection(chunk_rows=7, **more), torch.float64)
    outcome.loss.backward()
    return float(outcome.loss.detach()), {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("row_tokens", "more"), [(128, {}), (50, {"decay": 1e30, "kl": 0.5})], ids=["one row", "three rows"])
def test_loss_and_gradients_of_packed_rows_are_those_of_rows_apart(parts, name: str, row_tokens: int, more: dict[str, Any]) -> None:
    """Decay weights and their sum are float32: several rows sum in another order, so there all weights are 1."""
    features = [feature(length, prompt, length) for length, prompt in ((9, 3), (31, 6), (2, 0), (12, 1), (3, 0), (40, 20), (1, 0))]
    loss, gradients = steps(parts, name, features, 0, **more)
    packed_loss, packed = steps(parts, name, features, row_tokens, **more)
    assert packed_loss == pytest.approx(loss, rel=1e-9)
    assert set(packed) == set(gradients) and len(packed) > 20
    for parameter, gradient in gradients.items():
        assert gradient.any()
        torch.testing.assert_close(packed[parameter], gradient, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_a_document_never_sees_another_of_its_row(parts, name: str) -> None:
    """Documents of 1, 3 and 2 tokens and one of 20: whatever changes in one, the others' states stay bit for bit."""
    drafter, shared = parts(name)
    lengths = (1, 3, 2, 20)
    starts = torch.tensor([[0, 1, 1, 1, 4, 4, *[6] * 20]])
    whole = [feature(length, 0, length) for length in lengths]
    batch = batch_of([feature(26, 0, 9)], 0)
    texts = dataclasses.replace(
        batch.texts, input_ids=torch.cat([f.input_ids for f in whole])[None], taps=torch.cat([f.taps for f in whole])[None], starts=starts
    )
    anchors = torch.arange(26)[None]
    before = drafter(shared, texts, anchors)[0]
    for first, length in zip((0, 1, 4, 6), lengths, strict=True):
        taps, ids = texts.taps.clone(), texts.input_ids.clone()
        taps[0, first : first + length] += 1.0
        ids[0, first : first + length] = ids[0, first : first + length] % 63 + 1
        after = drafter(shared, dataclasses.replace(texts, taps=taps, input_ids=ids), anchors)[0]
        moved = (after != before).flatten(1).any(1)
        assert moved.tolist() == [first <= token < first + length for token in range(26)]
        alone = dataclasses.replace(
            texts, **{key: getattr(texts, key)[:, first : first + length] for key in ("input_ids", "taps")}, starts=starts.new_zeros(1, length)
        )
        own = drafter(shared, alone, torch.arange(length)[None])[0]
        torch.testing.assert_close(before[first : first + length], own, rtol=1e-12, atol=1e-12)


def test_a_packed_step_does_not_depend_on_where_the_run_started(captured) -> None:
    reader = ShardReader(captured / "features", "train")
    straight = list(step_batches(reader, 4, 6, 3, 1024, 0, 0, 8, CPU, 40))
    (resumed,) = step_batches(reader, 4, 6, 3, 1024, 0, 7, 8, CPU, 40)
    for name in ("input_ids", "starts", "taps"):
        assert torch.equal(getattr(straight[7].texts, name), getattr(resumed.texts, name))
    assert torch.equal(straight[7].anchors.position, resumed.anchors.position)
    assert straight[7].texts.input_ids.shape[0] < 4


def test_a_row_shorter_than_a_conversation_may_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.row_tokens=512 is less than train\.max_length=1024: raise it"):
        load_config(None, ["train.packing=rows", "train.row_tokens=512"])
    assert load_config(None, ["train.row_tokens=512"]).train.packing == "none"
