"""Branches: where they start, what law they are drawn from, how they become trees and blocks.

Legend: B rows, T tokens, N anchors, G draft tokens, W = G-1, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from branches_by_hand import KINDS
from by_hand import F64, randomised
from specgraft.distill.anchors import Anchors, branch_anchors, branch_points
from specgraft.distill.batch import Batch, supervised
from specgraft.distill.branches import branch_blocks, graft, sample_branches, score_branches
from specgraft.drafters.drafter import Texts
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import walk
from specgraft.ops.sampling import Law
from specgraft.records import Features, TargetScores
from specgraft.train.batch import collate, step_generator

# --- anchors


def test_any_token_of_an_answer_that_ends_nothing_is_a_point() -> None:
    """The last token of a text has no label behind it and still is one; prompts and end tokens are not."""
    ids = torch.tensor([[9, 8, 5, 1, 6, 7], [9, 5, 5, 5, 2, 0]])
    loss_mask = torch.tensor([[False, False, True, True, True, True], [False, True, True, True, True, False]])
    assert branch_points(ids, loss_mask, (1, 2)).int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]]
    assert torch.equal(branch_points(ids, loss_mask, ()), loss_mask)


def test_branches_are_drawn_by_document_and_have_every_slot() -> None:
    starts = torch.tensor([[0] * 10 + [10] * 30])
    points = torch.ones(1, 40, dtype=torch.bool)
    points[0, :4] = points[0, 10:14] = False
    seen = torch.zeros(40)
    for seed in range(400):
        drawn = branch_anchors(torch.rand(1, 40, generator=torch.Generator().manual_seed(seed)), points, starts, 4, 3)
        position = drawn.position[0]
        assert drawn.keep.all() and drawn.mask.all() and drawn.mask.shape == (1, 8, 3)
        assert (position[1:] > position[:-1]).all() and int((position < 10).sum()) == 4  # no place twice; four of each
        seen[position] += 1
    assert not seen[~points[0]].any()
    for place, share in ((slice(4, 10), 4 / 6), (slice(14, 40), 4 / 26)):
        assert (seen[place] / 400 - share).abs().max() < 4.5 * (share * (1 - share) / 400) ** 0.5
    none = branch_anchors(torch.rand(1, 40), torch.zeros_like(points), starts, 4, 3)
    assert not none.keep.any() and not none.mask.any()


def features(ids: list[int], prompt: int) -> Features:
    mask = torch.arange(len(ids)) >= prompt
    return Features("p", torch.tensor(ids), mask, torch.zeros(len(ids), 1, 2), torch.zeros(len(ids), 2))


@pytest.mark.parametrize("row_tokens", [0, 16])
def test_a_step_draws_anchors_of_branches(row_tokens: int) -> None:
    """An answer of one token has an anchor here, one that is an end token has none and is left out."""
    rows = [features([9, 9, 5, 6, 1], 2), features([9, 9, 5], 2), features([9, 9, 9, 1], 3)]
    device = torch.device("cpu")
    batch = collate(rows, 6, 3, 16, step_generator(0, 0, "anchors"), device, row_tokens, end_ids=(1,))
    drawn = {
        (int(batch.texts.starts[row, place]), int(place)) if row_tokens else (row, int(place))
        for row, places in enumerate(batch.anchors.position)
        for place in places[batch.anchors.keep[row]]
    }
    assert drawn == ({(0, 2), (0, 3), (5, 7)} if row_tokens else {(0, 2), (0, 3), (1, 2)})
    assert batch.anchors.mask.sum() == 3 * 3 and batch.texts.input_ids.shape[1] == (8 if row_tokens else 5)
    ordinary = collate(rows, 6, 3, 16, step_generator(0, 0, "anchors"), device, row_tokens)
    assert ordinary.anchors.keep.sum() == 2 and ordinary.anchors.mask.sum() == 2 + 1  # 2 -> 3, 4; 3 -> 4


# --- the law


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=20, dtype=F64, markov=1.0, spread=0.3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_walk_with_the_same_numbers(target, tiny_drafter, kind: str, temperature: float) -> None:
    drafter, shared = randomised(tiny_drafter(target, layers=1, bigram=0.0, taps=(0, 2), **KINDS[kind])), Shared.of(target, 0)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 4, 32, generator=generator, dtype=F64)
    before = torch.randint(0, 20, (50,), generator=generator)
    uniforms = torch.rand(50, 4, generator=generator, dtype=F64)
    with torch.no_grad():
        wanted = walk(drafter, shared, hidden, before, [Law(temperature)] * 50, uniforms).tokens[:, :3]
    for chunk in (1, 7, 1000):
        found = sample_branches(drafter, shared, hidden, before, uniforms[:, :3], temperature, chunk, F64)
        assert torch.equal(found, wanted), chunk
    assert len(wanted.unique()) > 8 and not found.requires_grad


def test_drafts_have_the_law_of_the_drafter(target, tiny_drafter) -> None:
    """Pairs of drafts against q_1(x) q_2(y | x) of the vanilla head, 20,000 branches of one anchor."""
    drafter, shared = randomised(tiny_drafter(target, layers=1, draft_tokens=3, bigram=0.0, rank=6, taps=(0, 2))), Shared.of(target, 0)
    generator = torch.Generator().manual_seed(1)
    hidden, count = torch.randn(1, 3, 32, generator=generator, dtype=F64), 20_000
    uniforms = torch.rand(count, 2, generator=generator, dtype=F64)
    drawn = sample_branches(drafter, shared, hidden.expand(count, -1, -1), torch.full((count,), 5), uniforms, 1.0, 5000, F64)
    with torch.no_grad():
        first, second = shared.head @ hidden[0, 0], shared.head @ hidden[0, 1]
        bias = drafter.markov_head.markov_w1.weight @ drafter.markov_head.markov_w2.weight.T
        law = (first + bias[5]).softmax(-1)[:, None] * (second + bias).softmax(-1)
    seen = torch.bincount(drawn[:, 0] * 20 + drawn[:, 1], minlength=400).double()
    expected = count * law.flatten()
    large = expected > 5
    distance = ((seen - expected)[large] ** 2 / expected[large]).sum()
    freedom = int(large.sum()) - 1
    assert freedom > 20 and float(distance) < freedom + 4 * (2 * freedom) ** 0.5


def test_half_precision_draws_what_float32_does(tiny_target, tiny_drafter) -> None:
    target = tiny_target(vocab=20, markov=1.0, spread=0.3)
    drafter, shared = tiny_drafter(target, layers=1, bigram=0.0, rank=6), Shared.of(target, 0)
    generator = torch.Generator().manual_seed(0)
    hidden, before = torch.randn(200, 4, 32, generator=generator), torch.randint(0, 20, (200,), generator=generator)
    uniforms = torch.rand(200, 3, generator=generator, dtype=F64)
    full, half = (sample_branches(drafter, shared, hidden, before, uniforms, 1.0, 64, kind) for kind in (torch.float32, torch.bfloat16))
    assert (full == half).double().mean() > 0.97


# --- trees and blocks


def packed() -> Batch:
    """Row 0: documents of 6 and 5 tokens; row 1: one of 4, and padding. x = 100 row + place."""
    ids = torch.arange(11) + 100 * torch.arange(2)[:, None]
    starts = torch.tensor([[0] * 6 + [6] * 5, [0] * 4 + [4] * 7])
    position, keep = torch.tensor([[2, 4, 7], [3, 0, 0]]), torch.tensor([[True, True, True], [True, False, False]])
    last = (ids[..., None] + torch.zeros(2)).double()
    return Batch(Texts(ids, torch.zeros(2, 11, 1, 2), starts), last, Anchors(position, keep, keep[..., None].expand(-1, -1, 3)))


def names(branches_per_anchor: int) -> torch.Tensor:
    """Tokens [2,M,2] that say where they are: 1000 row + 10 branch + node."""
    row, branch, node = torch.arange(2), torch.arange(3 * branches_per_anchor), torch.arange(2)
    return 1000 * (row[:, None, None] + 1) + 10 * branch[:, None] + node


def follow(stems: list[torch.Tensor], trees: list[Any]) -> list[TargetScores]:
    """The state of a node is its own token, half a step up."""
    return [TargetScores((tree.branches[..., None] + 0.5).double().expand(-1, -1, 2)) for tree in trees]


def test_every_document_is_a_stem_up_to_its_last_anchor() -> None:
    found = graft(packed(), names(2), 2)
    assert [each.row for each in found] == [0, 0, 1]
    assert [each.stem.tolist() for each in found] == [[0, 1, 2, 3, 4], [6, 7], [100, 101, 102, 103]]
    assert [each.tree.anchors.tolist() for each in found] == [[2, 2, 4, 4], [1, 1], [3, 3]]
    assert [each.tree.stem for each in found] == [5, 2, 4]
    assert [each.members.tolist() for each in found] == [[0, 1, 2, 3], [4, 5], [0, 1]]
    assert found[1].tree.branches.tolist() == [[1040, 1041], [1050, 1051]]
    assert found[0].tree.positions.tolist() == [[3, 4], [3, 4], [5, 6], [5, 6]]


@pytest.mark.parametrize("many", [1, 2])
def test_slot_one_reads_the_text_and_slot_j_its_own_branch(many: int) -> None:
    batch, tokens = packed(), names(many)
    nodes = score_branches(graft(batch, tokens, many), follow, tokens, batch.last)
    blocks = branch_blocks(batch, tokens, nodes, many, ())
    slots = supervised(blocks)
    assert len(slots) == 4 * many * 3
    for row, block, slot, label, source in zip(slots.row, slots.block, slots.slot, slots.label, slots.source, strict=True):
        anchor = int(batch.texts.input_ids[row, batch.anchors.position[row, block // many]])
        own = [anchor, *tokens[row, block].tolist(), 0]
        assert int(label) == own[slot + 1] and int(slots.before[source]) == own[slot]
        state = blocks.states[slots.places[source]].tolist()
        assert state == ([anchor] * 2 if slot == 0 else [own[slot] + 0.5] * 2)
    assert len(slots.places) == 4 + 4 * many * 2  # branches of one anchor share its state


def test_an_anchor_one_token_off_is_seen_in_the_state_of_its_first_slot() -> None:
    batch, tokens = packed(), names(1)
    nodes = score_branches(graft(batch, tokens, 1), follow, tokens, batch.last)
    right = supervised(branch_blocks(batch, tokens, nodes, 1, ()))
    states = branch_blocks(batch, tokens, nodes, 1, ()).states
    first = states[right.places[right.source[right.slot == 0]]][:, 0].tolist()
    assert first == [2, 4, 7, 103]  # x of a token is its place: last[a], neither last[a-1] nor last[a+1]


def test_what_lies_behind_an_end_token_is_masked_and_the_end_token_itself_is_not() -> None:
    batch = packed()
    tokens = torch.tensor([[[5, 5], [1, 5], [5, 2]], [[1, 2], [5, 5], [5, 5]]])
    mask = branch_blocks(batch, tokens, batch.last.new_zeros(2, 3, 2, 2), 1, (1, 2)).mask
    # d_1 ends: slot 1 proposes it and counts, slots 2 and 3 follow it; d_2 ends: slot 3 follows it
    assert mask.int().tolist() == [[[1, 1, 1], [1, 0, 0], [1, 1, 0]], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]]
    for ends, drawn in itertools.product([(), (1,)], [torch.zeros(2, 3, 0, dtype=torch.long)]):  # one draft a round: no node
        lone = branch_blocks(batch, drawn, batch.last.new_zeros(2, 3, 0, 2), 1, ends)
        assert torch.equal(lone.mask[..., 0], batch.anchors.keep) and lone.mask.shape == (2, 3, 1)
