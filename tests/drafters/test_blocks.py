"""Packed training forward of the block drafters against one block at a time, and what a block reads, bit by bit.

Legend: B rows, T tokens, N anchors, G draft tokens, K taps, D hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from by_hand import F64, block_by_hand, blocks_by_hand, randomised
from specgraft.drafters import trunk
from specgraft.drafters.cache import DraftCache
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.precision import precision
from specgraft.drafters.shared import Shared

G = 4
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"block_causal": True},
    "sliding": {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "block_causal": True},
}
# documents of a row back to back: one of two tokens, one that is the whole row, anchors at starts, ends and doubled
STARTS = ([0, 9, 11, 23], [0], [0, 1, 17])
ANCHORS = ([0, 8, 9, 10, 11, 15, 22, 29], [0, 1, 5, 6, 12, 20, 28, 29], [0, 1, 2, 16, 17, 24, 24, 0])


def texts_of(rows: Any = STARTS, length: int = 30, dtype: torch.dtype = F64, seed: int = 0) -> Texts:
    """Random tokens and taps of rows with these documents."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([[max(start for start in row if start <= place) for place in range(length)] for row in rows])
    ids = torch.randint(1, 64, (len(rows), length), generator=generator)
    return Texts(ids, torch.randn(len(rows), length, 3, 32, generator=generator, dtype=F64).to(dtype), starts)


@pytest.fixture(scope="module")
def models(tiny_target, tiny_drafter):
    """Builds drafter and shared tensors of a kind and shape."""

    def make(kind: str, shape: str, dtype: torch.dtype = F64, size: int = G) -> tuple[Drafter, Shared]:
        target = tiny_target(dtype=dtype, markov=1.0, spread=0.3)
        drafter = tiny_drafter(target, draft_tokens=size, bigram=0.0, rank=6, kind=kind, **SHAPES[shape]) if kind == "dspark" else (
            tiny_drafter(target, draft_tokens=size, bigram=0.0, kind=kind, **SHAPES[shape])
        )  # fmt: skip
        return randomised(drafter), Shared(target.embedding.weight.detach(), target.head.weight.detach(), target.final_norm, 0)

    return make


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_all_blocks_at_once_equal_one_at_a_time(models, kind: str, shape: str) -> None:
    drafter, shared = models(kind, shape)
    texts, anchors = texts_of(), torch.tensor(ANCHORS)
    found, expected = drafter(shared, texts, anchors), blocks_by_hand(drafter, shared, texts, anchors)
    assert found.shape == (3, 8, G, 32)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    probe = torch.randn(found.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    names = [name for name, _ in drafter.named_parameters() if not name.startswith(("markov_head", "confidence_head"))]
    own = [dict(drafter.named_parameters())[name] for name in names]
    left, right = (torch.autograd.grad((probe * states).sum(), own) for states in (found, expected))
    for name, a, b in zip(names, left, right, strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()), msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("shape", ["full", "mixed"])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_document_in_a_packed_row_is_that_document_alone(models, kind: str, shape: str) -> None:
    drafter, shared = models(kind, shape)
    texts = texts_of()
    together = drafter(shared, texts, torch.tensor(ANCHORS))
    for row, first, stop, blocks in ((0, 11, 23, (4, 5, 6)), (2, 1, 17, (1, 2, 3))):
        cut = (slice(row, row + 1), slice(first, stop))
        alone = Texts(texts.input_ids[cut], texts.taps[cut], torch.zeros(1, stop - first, dtype=torch.long))
        anchors = torch.tensor([[ANCHORS[row][block] - first for block in blocks]])
        torch.testing.assert_close(drafter(shared, alone, anchors)[0], together[row, list(blocks)], rtol=1e-11, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("anchor", [1000, 8000])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_far_blocks_sit_at_their_own_positions(models, kind: str, anchor: int) -> None:
    """faults.md D6: a seed one position early is harmless near the start only. In training and in decoding alike."""
    drafter, shared = models(kind, "full", size=8 if kind == "dspark" else 7)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (1, anchor + 1), generator=generator)
    texts = Texts(ids, torch.randn(1, anchor + 1, 3, 32, generator=generator, dtype=F64), torch.zeros_like(ids))
    seen = []
    real = drafter.trunk.run

    def spied(x: Any, positions: Any, context: Any, first: Any, end: Any) -> Any:
        seen.append((positions.tolist(), first.tolist(), end.tolist()))
        return real(x, positions, context, first, end)

    drafter.trunk.run = spied
    found = drafter(shared, texts, torch.tensor([[anchor]]))
    cache = DraftCache(drafter, shared, 1, anchor + 1)
    cache.append(texts.taps[:, :anchor], ids, torch.tensor([anchor]), torch.tensor([0]))
    with precision(drafter):
        drafted = drafter.trunk.draft_states(shared, cache, torch.tensor([0]), ids[0, -1:])
    assert seen == [([[list(range(anchor, anchor + 8))]], [[0]], [[anchor]])] * 2  # 8 slots behind the last context position
    torch.testing.assert_close(drafted, found[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0, 0], block_by_hand(drafter, shared, ids[0].tolist(), texts.taps[0], anchor), rtol=1e-9, atol=1e-9)


# --- what a block reads: exact, bit by bit


def moved(drafter: Drafter, shared: Shared, texts: Texts, anchors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[N,G] bool: states of row 0 that are not what they were, in any bit."""
    return (drafter(shared, texts, anchors)[0] != before[0]).any(-1)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_block_reads_the_states_before_its_anchor_in_its_document_and_window(models, kind: str, shape: str) -> None:
    drafter, shared = models(kind, shape, torch.float32, 5)
    texts, anchors = texts_of(([0, 8],), 24, torch.float32), torch.tensor([[4, 6, 12, 20]])
    before = drafter(shared, texts, anchors)
    first_slot = 1 if kind == "dflash" else 0
    layers = SHAPES[shape].get("layer_types", ("full_attention",) * 2)
    for place in range(24):
        taps = texts.taps.clone()
        taps[0, place] += 1.0
        found = moved(drafter, shared, dataclasses.replace(texts, taps=taps), anchors, before)
        for block, anchor in enumerate(anchors[0].tolist()):
            inside = place < anchor and (place >= 8) == (anchor >= 8)
            if not inside:
                assert not found[block].any(), (place, anchor)
            elif "full_attention" in layers:
                assert found[block].all(), (place, anchor)
            else:  # window 6: slot o reads its own context; what another slot reads reaches it inside the block
                by = [anchor + slot - place < 6 for slot in range(first_slot + 5)]
                assert found[block].tolist() == [any(by)] * 5, (place, anchor)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_slot_reads_its_own_window_only(models, kind: str) -> None:
    """One sliding layer, causal in the block: slot o reads places above anchor + o - 6, by itself or by slots before it."""
    drafter, shared = models(kind, "mixed", torch.float32, 5)
    drafter.trunk.config = dataclasses.replace(drafter.config, layers=1, layer_types=("sliding_attention",))
    drafter.trunk.layers = drafter.trunk.layers[:1]
    texts, anchors = texts_of(([0],), 24, torch.float32), torch.tensor([[12]])
    context = drafter.encode(shared, texts)
    extra = 1 if kind == "dflash" else 0
    x = torch.randn(1, 1, 5 + extra, 32, generator=torch.Generator().manual_seed(3))
    at = anchors[..., None] + torch.arange(5 + extra)

    def run(pairs: Any) -> torch.Tensor:
        return drafter.trunk.run(x, at, pairs, torch.zeros_like(anchors), anchors)[0, 0]

    before = run(context)
    for place in range(24):
        pairs = [(keys.clone(), values.clone()) for keys, values in context]
        pairs[0][1][0, place] += 1.0
        found = (run(pairs) != before).any(-1).tolist()
        assert found == [place < 12 and 12 + slot - place < 6 for slot in range(5 + extra)], place


@torch.no_grad()
@pytest.mark.parametrize("shape", ["full", "causal"])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_block_reads_no_token_but_its_anchor(models, kind: str, shape: str) -> None:
    drafter, shared = models(kind, shape, torch.float32, 8)
    texts, anchors = texts_of(([0],), 16, torch.float32), torch.tensor([[4, 6]])
    before = drafter(shared, texts, anchors)
    for place in range(16):
        ids = texts.input_ids.clone()
        ids[0, place] = ids[0, place] % 63 + 1
        found = moved(drafter, shared, dataclasses.replace(texts, input_ids=ids), anchors, before)
        for block, anchor in enumerate((4, 6)):
            assert found[block].tolist() == [anchor == place] * 8


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_blocks_never_meet(models, kind: str) -> None:
    """The states of one block are the same whatever other blocks stand beside it (but for the order of sums)."""
    drafter, shared = models(kind, "full", size=8)
    texts = texts_of(([0],), 16)
    before = drafter(shared, texts, torch.tensor([[4, 6]]))
    for other in range(5, 16):
        after = drafter(shared, texts, torch.tensor([[4, other]]))
        torch.testing.assert_close(after[0, 0], before[0, 0], rtol=1e-12, atol=1e-12)
        assert bool((after[0, 1] - before[0, 1]).abs().max() > 1e-3) is (other != 6)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["full", "causal"])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_slots_see_each_other_in_both_directions_or_backwards_only(models, monkeypatch, kind: str, shape: str) -> None:
    """faults.md D3: the input of slot k+1 moves slot k, and not where the block is causal; other blocks never move."""
    drafter, shared = models(kind, shape, torch.float32, 8)
    texts, anchors = texts_of(([0],), 16, torch.float32), torch.tensor([[4, 6]])
    before = drafter(shared, texts, anchors)
    slots, real = 8 + (kind == "dflash"), trunk.open_block
    for slot in range(slots):

        def touched(*args: Any, slot: int = slot) -> torch.Tensor:
            x = real(*args)
            assert x.shape[2] == slots
            x[0, 1, slot] += torch.linspace(-1, 1, 32)
            return x

        with monkeypatch.context() as patch:
            patch.setattr(trunk, "open_block", touched)
            found = moved(drafter, shared, texts, anchors, before)
        assert not found[0].any()
        drafts = range(slots - 8, slots)  # dflash's slot 0 proposes nothing
        assert found[1].tolist() == [shape == "full" or slot <= own for own in drafts]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_padding_and_other_rows_change_nothing(models, kind: str) -> None:
    drafter, shared = models(kind, "full")
    together, anchors = texts_of(([0], [0]), 17), torch.tensor([[5, 6], [9, 12]])
    alone = Texts(together.input_ids[:1, :8], together.taps[:1, :8], together.starts[:1, :8])
    whole = drafter(shared, together, anchors)
    torch.testing.assert_close(whole[:1], drafter(shared, alone, anchors[:1]), rtol=1e-12, atol=1e-12)
    taps = together.taps.clone()
    taps[0, 8:] = 1e6
    assert torch.equal(drafter(shared, dataclasses.replace(together, taps=taps), anchors), whole)
