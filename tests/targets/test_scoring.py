"""Tree scores against unpatched transformers on [stem up to the anchor + branch] alone, for every kind of target.

Planted faults are in `test_scoring_faults`. Legend: S stem tokens, N branches, W tokens a branch.
"""

from __future__ import annotations

import pytest
import torch
from hybrids import END, HYBRIDS, KINDS, TREES, VOCAB, alone, apart, as_target, build, make_tree, oracle, text, tiny

from specgraft.ops.gated_delta.chunked import Record
from specgraft.ops.sparse_choice import vectorised
from specgraft.records import ProposalTree
from specgraft.targets import gated_delta
from specgraft.targets.parts import tree_work
from specgraft.targets.scoring import Stem, prefill, score, score_packed, scorer

WIDE, NARROW = torch.float64, torch.float32
EVERY = pytest.mark.parametrize("kind", KINDS)
HYBRID = pytest.mark.parametrize("kind", HYBRIDS)


@EVERY
@pytest.mark.parametrize("name", TREES)
def test_every_row_is_that_of_the_text_alone(kind, name) -> None:
    model, (ids, tree) = tiny(kind, WIDE), make_tree(name)
    expected = oracle(kind, WIDE, name)
    stem, packed = score_packed(model.target, ids, tree, [0, 2])
    assert packed.hidden.shape[:2] == tree.branches.shape
    assert apart(model.logits(packed.hidden), expected) < 1e-9
    first = prefill(model.target, ids, [0, 2])
    assert apart(model.logits(score(model.target, first, tree).hidden), expected) < 1e-9
    layers = model.layers(ids)
    streams = model.target.streams
    for made in (stem, first):
        assert made.last.shape == (len(ids), streams * model.target.hidden_size)
        assert apart(made.last, layers[-1]) < 1e-9
        for place, layer in enumerate((0, 2)):
            assert apart(made.taps[:, place], layers[layer].unflatten(-1, (streams, -1)).mean(-2)) < 1e-9


@EVERY
@pytest.mark.parametrize("name", ["borders", "wide", "stem of 3"])
def test_in_float32_the_error_is_that_of_the_models_own_cache(kind, name) -> None:
    model, (ids, tree) = tiny(kind, NARROW), make_tree(name)
    expected = oracle(kind, NARROW, name)
    own = max(
        apart(model.continued(ids[: anchor + 1], branch), row)
        for anchor, branch, row in zip(tree.anchors.tolist(), tree.branches, expected, strict=True)
    )
    assert apart(model.logits(score_packed(model.target, ids, tree)[1].hidden), expected) < 10 * own
    assert apart(model.logits(score(model.target, prefill(model.target, ids), tree).hidden), expected) < 10 * own


@HYBRID
@pytest.mark.parametrize("size", [1, 17, 32, 64])
def test_it_does_not_matter_how_often_states_are_kept(kind, size, monkeypatch) -> None:
    """Anchors 62, 63 and 64, 127 and 128 lie on both sides of a kept state for every power of two up to 64."""
    model, (ids, tree) = tiny(kind, WIDE), make_tree("borders")
    honest, seen = gated_delta.choose("cpu"), set()

    def sized(q, k, v, g, beta, initial, chunk):
        out, record = honest(q, k, v, g, beta, initial, size)
        seen.add(record.chunk)
        return out, record

    monkeypatch.setattr(gated_delta, "choose", lambda device: sized)
    assert apart(model.logits(score_packed(model.target, ids, tree)[1].hidden), oracle(kind, WIDE, "borders")) < 1e-9
    found = score(model.target, prefill(model.target, ids), tree)
    assert apart(model.logits(found.hidden), oracle(kind, WIDE, "borders")) < 1e-9 and size in seen


def divergence(truth: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL."""
    truth, logits = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((truth.exp() * (truth - logits)).sum(-1).mean())


@EVERY
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(kind) -> None:
    """Roundings differ, and flip experts and groups now and then; laws must not be further from the truth."""
    model, (ids, tree) = tiny(kind, torch.bfloat16), make_tree("borders")
    truth = oracle(kind, NARROW, "borders")
    own = divergence(truth, oracle(kind, torch.bfloat16, "borders"))
    found = model.logits(score_packed(model.target, ids, tree)[1].hidden)
    assert found.dtype == torch.bfloat16 and divergence(truth, found) < 2 * own


@HYBRID
def test_a_tree_mask_alone_is_not_enough(kind) -> None:
    """The control: transformers itself, told by mask and positions what a node sees; states and n-grams run on through the tree."""
    model, (ids, tree) = tiny(kind, WIDE), make_tree("borders")
    count, width = tree.branches.shape
    node = torch.arange(count * width)
    own = (node[:, None] // width == node // width) & (node <= node[:, None])
    behind = (torch.arange(len(ids)) <= tree.anchors[:, None]).repeat_interleave(width, 0)
    above = torch.cat([torch.ones(len(ids), len(ids)).tril().bool(), torch.zeros(len(ids), count * width).bool()], 1)
    seen = torch.cat([above, torch.cat([behind, own], 1)])
    mask = torch.zeros(1, 1, *seen.shape, dtype=WIDE).masked_fill(~seen, torch.finfo(WIDE).min)
    masks = {"full_attention": mask, "indexed_attention": mask, "linear_attention": None}
    positions = torch.cat([torch.arange(len(ids)), tree.positions.flatten()])[None]
    with torch.inference_mode():
        out = model.plain(
            input_ids=torch.cat([ids, tree.branches.flatten()])[None], position_ids=positions, attention_mask=masks, use_cache=False
        )
    found = out.logits[0, len(ids) :].unflatten(0, (count, width))
    assert apart(out.logits[0, : len(ids)], model.alone(ids)) < 1e-9  # the stem is right: the masks are read
    assert apart(found, oracle(kind, WIDE, "borders")) > 1


def memory(stem: Stem) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [stem.last]
    for value in stem.part.memory.values():
        if isinstance(value, Record):
            found += [value.states, value.keys, value.news, value.decay]
        else:
            found += list(value) if isinstance(value, tuple) else [value]
    return found


@EVERY
def test_one_stem_serves_any_number_of_trees_and_stays_as_it_is(kind) -> None:
    model, ids = tiny(kind, NARROW), text(75)
    trees = [
        ProposalTree(75, torch.tensor([74, 3, 63]), text(15, 1).view(3, 5)),
        ProposalTree(75, torch.tensor([64]), text(9, 2).view(1, 9)),
        ProposalTree(75, torch.tensor([0, 0, 30, 70]), text(8, 3).view(4, 2)),
    ]
    stem = prefill(model.target, ids)
    before = [x.clone() for x in memory(stem)]
    for tree in [*trees, trees[0]]:
        found = score(model.target, stem, tree).hidden
        assert torch.equal(found, score(model.target, prefill(model.target, ids), tree).hidden)
    assert len(before) == len(memory(stem)) > 1
    assert all(torch.equal(old, new) for old, new in zip(before, memory(stem), strict=True))
    assert not stem.part.chosen


def test_a_packed_stem_serves_trees_too() -> None:
    model, (ids, tree) = tiny("qwen4_exp", WIDE), make_tree("borders")
    stem, _ = score_packed(model.target, ids, ProposalTree(len(ids), torch.tensor([9]), text(5, 4)[None]))
    assert apart(model.logits(score(model.target, stem, tree).hidden), oracle("qwen4_exp", WIDE, "borders")) < 1e-9


@EVERY
def test_branches_without_tokens_and_trees_without_branches(kind) -> None:
    model, ids = tiny(kind, NARROW), text(9)
    for anchors, branches in (([2, 8], torch.zeros(2, 0)), ([], torch.zeros(0, 4))):
        tree = ProposalTree(9, torch.tensor(anchors, dtype=torch.long), branches.long())
        stem, packed = score_packed(model.target, ids, tree)
        width = model.target.hidden_size * model.target.streams
        assert packed.hidden.shape == score(model.target, stem, tree).hidden.shape == (*branches.shape, width)


@EVERY
def test_rows_that_may_not_see_a_change_move_by_exactly_nothing(kind, monkeypatch) -> None:
    """Another branch's tokens; the stem behind an anchor. float32, not one bit; and the rows that should move do.

    Experts are multiplied token by token here: gathered, the size of an expert's product depends on who else goes there, and
    with three rows or fewer it sums in another order, in transformers' own passes too.
    """
    model, (ids, tree) = tiny(kind, NARROW), make_tree("borders")
    monkeypatch.setattr(model.target.config, "_experts_implementation", "batched_mm")
    stem, packed = score_packed(model.target, ids, tree)
    behind = score(model.target, stem, tree)

    branches = tree.branches.clone()
    branches[4] = (branches[4] + 1 + torch.arange(7)) % VOCAB
    others = [number for number in range(len(branches)) if number != 4]
    changed = ProposalTree(tree.stem, tree.anchors, branches)
    again, found = score_packed(model.target, ids, changed)
    assert torch.equal(again.last, stem.last)
    for now, then in ((found, packed), (score(model.target, stem, changed), behind)):
        assert torch.equal(now.hidden[others], then.hidden[others])
        assert apart(model.logits(now.hidden[4]), model.logits(then.hidden[4])) > 0.1

    for cut in (63, 67):  # at a checkpoint, and within a chunk
        late = ids.clone()
        late[cut + 1 :] = (late[cut + 1 :] + 1 + torch.arange(len(ids) - cut - 1)) % VOCAB
        blind = tree.anchors <= cut
        again, found = score_packed(model.target, late, tree)
        assert torch.equal(again.last[: cut + 1], stem.last[: cut + 1])
        for now, then in ((found, packed), (score(model.target, again, tree), behind)):
            assert torch.equal(now.hidden[blind], then.hidden[blind])
            moved = (model.logits(now.hidden[~blind]) - model.logits(then.hidden[~blind])).abs().amax((1, 2))
            assert moved.min() > 0.1


@pytest.mark.parametrize("ends", [[], [0], [1], [2, 5]])
def test_an_end_token_cuts_the_n_grams_of_a_branch(ends) -> None:
    """qwen4_exp: the 2-grams and 3-grams of the first nodes reach into the stem unless an end token stands between."""
    model = tiny("qwen4_exp", WIDE)
    for last in ([7, 9], [END, 9], [9, END]):
        ids = torch.cat([text(11), torch.tensor(last)])
        branches = torch.tensor([[5, 6, 7, 8, 9, 10]])
        branches[0, ends] = END
        tree = ProposalTree(13, torch.tensor([12]), branches)
        assert apart(model.logits(score_packed(model.target, ids, tree)[1].hidden), alone(model, ids, tree)) < 1e-9


@pytest.mark.parametrize("anchor", range(13, 22))
def test_both_sides_of_every_group_border(anchor) -> None:
    """qwen4_exp: 0 to 3 tokens of the stem left over in the anchor's open group, at the budget's own border (16 + 3 tokens) too."""
    model, ids = tiny("qwen4_exp", WIDE), text(33)
    tree = ProposalTree(33, torch.tensor([anchor, anchor]), text(18, anchor).view(2, 9))
    assert apart(model.logits(score_packed(model.target, ids, tree)[1].hidden), alone(model, ids, tree)) < 1e-9


def test_groups_of_equal_score_are_chosen_alike_on_stems_branches_and_rows(monkeypatch) -> None:
    """With one indexer head relu makes many scores exactly 0; transformers breaks such ties as its top-k happens to."""
    target = as_target(build("qwen4_exp", WIDE, indexer_n_heads=1, indexer_budget=64))
    ties, honest = [], vectorised._best

    def best(scores, topk):
        chosen = honest(scores, topk)
        ties.append(int(((scores == 0) & ~chosen).any(-1).logical_and(((scores == 0) & chosen).any(-1)).sum()))
        return chosen

    monkeypatch.setattr(vectorised, "_best", best)
    ids, tree = make_tree("borders")
    _, found = score_packed(target, ids, tree)
    assert sum(ties) > 20  # nodes that chose some groups of score 0 and left others
    for anchor, branch, states in zip(tree.anchors.tolist(), tree.branches, found.hidden, strict=True):
        whole = torch.cat([ids[: anchor + 1], branch])
        assert apart(prefill(target, whole).last[anchor + 1 :], states) < 1e-9
        cache = target.cache(1, len(whole))
        target.forward(whole[None, : anchor + 1], cache)
        cache.lengths += anchor + 1
        assert apart(target.forward(branch[None], cache).last[0], states) < 1e-9


def test_the_function_that_training_asks() -> None:
    model = tiny("qwen3_5", NARROW)
    asked = [make_tree("stem of 3"), make_tree("one token")]
    found = scorer(model.target)([ids for ids, _ in asked], [tree for _, tree in asked])
    for (ids, tree), scores in zip(asked, found, strict=True):
        assert torch.equal(scores.hidden, score_packed(model.target, ids, tree)[1].hidden)


def test_what_does_not_fit_is_refused() -> None:
    target, ids = tiny("llama", NARROW).target, text(5)
    stem = prefill(target, ids)
    with pytest.raises(ValueError, match="an empty stem"):
        prefill(target, ids[:0])
    for tree, message in (
        (ProposalTree(6, torch.tensor([0]), text(2)[None]), "made for a stem of 6 tokens and this one has 5"),
        (ProposalTree(5, torch.tensor([0, 5]), text(4).view(2, 2)), "0 to 4: 0 to 5 were given"),
        (ProposalTree(5, torch.tensor([-1]), text(2)[None]), "0 to 4: -1 to -1 were given"),
        (ProposalTree(5, torch.tensor([1]), text(4).view(2, 2)), "need one anchor each"),
    ):
        for ask in (lambda tree=tree: score(target, stem, tree), lambda tree=tree: score_packed(target, ids, tree)):
            with pytest.raises(ValueError, match=message):
                ask()
    for taps in ([-1], [3]):
        with pytest.raises(ValueError, match=r"tap .*decoder layers are 0 to 2"):
            prefill(target, ids, taps)


def test_positions_and_order_of_a_packed_pass() -> None:
    tree = ProposalTree(3, torch.tensor([2, 0]), torch.tensor([[5, 6], [7, 8]]))
    part = prefill(tiny("llama", NARROW).target, text(3)).part
    work = tree_work(torch.tensor([1, 2, 3]), tree, part)
    assert work.ids.tolist() == [[1, 2, 3, 5, 6, 7, 8]] and work.positions.tolist() == [[0, 1, 2, 3, 4, 1, 2]]
    assert [x.shape for x in work.split(work.ids[..., None])] == [(1, 3, 1), (2, 2, 1)]
    assert torch.equal(work.merge(work.split(work.ids)), work.ids)
