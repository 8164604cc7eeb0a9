"""Faults planted in the code that scores trees: each is caught by the comparison with transformers, at the rows it concerns.

Anchors of the tree: 0, 129 (the stem's end), 62, 63, 64, 63, 127, 128 (about states kept every 16, 32 or 64 tokens), 66, 67, 68.
Legend: N branches, W tokens a branch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrids import HYBRIDS, KINDS, make_tree, oracle, tiny

from specgraft.ops.gated_delta.chunked import Record
from specgraft.records import ProposalTree
from specgraft.targets import parts, scoring
from specgraft.targets.parts import NodesPart, tree_work

WIDE, CAUGHT = torch.float64, 1e-3
LINEAR = pytest.mark.parametrize("kind", HYBRIDS)
TURNED = [kind for kind in KINDS if kind != "kimi_linear"]  # kimi_linear knows no positions
ANCHORS = make_tree("borders")[1].anchors
OPEN = (ANCHORS + 1) % 4 != 0  # the anchor lies within a QSA group


def errors(kind: str) -> torch.Tensor:
    """[2,N] largest error of a branch: packed, and behind a stem."""
    model, (ids, tree) = tiny(kind, WIDE), make_tree("borders")
    expected = oracle(kind, WIDE, "borders")
    packed = scoring.score_packed(model.target, ids, tree)[1]
    behind = scoring.score(model.target, scoring.prefill(model.target, ids), tree)
    return torch.stack([(model.logits(found.hidden) - expected).abs().amax((1, 2)) for found in (packed, behind)])


def check(kind: str, wrong: torch.Tensor) -> None:
    """Every branch in `wrong` [N] is caught, and every other one is as it should be."""
    found = errors(kind)
    assert bool((found[:, wrong] > CAUGHT).all()), found
    assert bool((found[:, ~wrong] < 1e-9).all()), found


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_nothing_is_caught(kind) -> None:
    check(kind, torch.zeros(len(ANCHORS), dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
def test_anchor_off_by_one(kind, monkeypatch) -> None:
    def fault(ids, tree, stem):
        return tree_work(ids, tree and ProposalTree(tree.stem, (tree.anchors - 1).clamp(min=0), tree.branches), stem)

    monkeypatch.setattr(scoring, "tree_work", fault)
    check(kind, ANCHORS > 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mistral", "qwen4_exp")])
@pytest.mark.parametrize("by", [-1, 1])
def test_anchor_off_by_one_in_what_attention_sees(kind, by, monkeypatch) -> None:
    """By one more there is nothing to see behind the stem's end."""
    honest = NodesPart._visible

    def fault(self, window):
        moved = ProposalTree(self.tree.stem, self.tree.anchors + by, self.tree.branches)
        return honest(replace(self, tree=moved, masks={}), 0) if not window else honest(self, window)

    monkeypatch.setattr(NodesPart, "_visible", fault)
    check(kind, ANCHORS < 129 if by > 0 else ANCHORS >= 0)


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
def test_a_window_off_by_one(kind, monkeypatch) -> None:
    honest = NodesPart._visible
    monkeypatch.setattr(NodesPart, "_visible", lambda self, window: honest(self, window and window + 1))
    check(kind, ANCHORS >= 0)


@LINEAR
def test_anchor_off_by_one_in_the_state(kind, monkeypatch) -> None:
    honest = Record.after
    monkeypatch.setattr(Record, "after", lambda self, rows, counts: honest(self, rows, counts - 1))
    check(kind, ANCHORS >= 0)


@pytest.mark.parametrize("kind", TURNED)
def test_packed_instead_of_semantic_positions(kind, monkeypatch) -> None:
    def fault(ids, tree, stem):
        work = tree_work(ids, tree, stem)
        first = stem.length if ids is None else 0
        return replace(work, positions=first + torch.arange(work.ids.shape[1])[None])

    monkeypatch.setattr(scoring, "tree_work", fault)
    check(kind, ANCHORS >= 0)


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss"])
def test_packed_instead_of_semantic_positions_in_a_window(kind, monkeypatch) -> None:
    honest = NodesPart._visible

    def fault(self, window):
        if not window:
            return honest(self, window)
        place = self.tree.stem + torch.arange(self.tree.branches.numel()).view_as(self.tree.branches)
        token = torch.arange(self.tree.stem)
        return (token <= self.tree.anchors[:, None])[:, None] & (place[..., None] - token < window)

    monkeypatch.setattr(NodesPart, "_visible", fault)
    check(kind, ANCHORS >= 0)


def test_group_straddling_branches(monkeypatch) -> None:
    """The tokens that the anchor's open group misses are those laid before it, the end of the branch before."""
    honest = parts.own_groups

    def fault(stem_raw, branch_raw, anchors, ratio):
        raw, first = honest(stem_raw, branch_raw, anchors, ratio)
        left, raw = (anchors + 1) % ratio, raw.clone()
        for number, count in enumerate(left.tolist()):
            if count:
                raw[number, 0, :count] = branch_raw[number - 1, -count:]
        return raw, first

    monkeypatch.setattr(parts, "own_groups", fault)
    found = errors("qwen4_exp")
    assert bool((found[:, ~OPEN] < 1e-9).all()) and bool((found[:, OPEN].amax(1) > CAUGHT).all()), found


def test_group_of_the_stem_behind_the_anchor(monkeypatch) -> None:
    """The stem's own group about the anchor, with tokens that the branch must not know."""
    honest = parts.own_groups

    def fault(stem_raw, branch_raw, anchors, ratio):
        raw, first = honest(stem_raw, branch_raw, anchors, ratio)
        place = first[:, :1] + torch.arange(ratio)
        leak = OPEN & (place[:, -1] < len(stem_raw))
        raw = raw.clone()
        raw[leak, 0] = stem_raw[place[leak]]
        return raw, first

    monkeypatch.setattr(parts, "own_groups", fault)
    found = errors("qwen4_exp")
    assert bool((found[:, ~OPEN] < 1e-9).all()) and bool((found[:, OPEN].amax(1) > CAUGHT).all()), found


def test_group_turned_as_the_first_of_the_branch(monkeypatch) -> None:
    """A group's position is that of its first token, which may lie on the stem."""
    honest = parts.own_groups

    def fault(stem_raw, branch_raw, anchors, ratio):
        raw, first = honest(stem_raw, branch_raw, anchors, ratio)
        return raw, first + ((anchors + 1) % ratio)[:, None]

    monkeypatch.setattr(parts, "own_groups", fault)
    found = errors("qwen4_exp")
    assert bool((found[:, ~OPEN] < 1e-9).all()) and bool((found[:, OPEN].amax(1) > CAUGHT).all()), found


@LINEAR
@pytest.mark.parametrize("by", [-1, 1])
def test_state_from_the_wrong_checkpoint(kind, by, monkeypatch) -> None:
    """That before, where there is one, or that behind."""
    honest, sizes = Record.after, set()

    def fault(self, rows, counts):
        sizes.add(self.chunk)
        places = (torch.arange(self.states.shape[1]) + by).clamp(0, self.states.shape[1] - 1)
        return honest(replace(self, states=self.states[:, places]), rows, counts)

    monkeypatch.setattr(Record, "after", fault)
    errors(kind)
    (size,) = sizes
    check(kind, ANCHORS + 1 >= size if by < 0 else ANCHORS >= 0)


@LINEAR
def test_state_of_the_stems_end(kind, monkeypatch) -> None:
    honest = Record.after
    monkeypatch.setattr(Record, "after", lambda self, rows, counts: honest(self, rows, torch.full_like(counts, 130)))
    check(kind, ANCHORS < 129)


def misplace(monkeypatch, name: str, place) -> None:
    """What lies before a branch, for one thing of a layer, is taken as `place` says: (values, context, tree) -> context."""
    honest = NodesPart.before

    def fault(self, key, values, width, fill=0):
        found = honest(self, key, values, width, fill)
        if key[1] != name:
            return found
        return place(self.stem.memory[key], values, found, lambda anchors: honest(
            replace(self, tree=replace(self.tree, anchors=anchors)), key, values, width, fill
        ))  # fmt: skip

    monkeypatch.setattr(NodesPart, "before", fault)


PLACES = {
    "one token early": (lambda past, new, found, at: at(ANCHORS - 1), ANCHORS >= 0),
    "the stem's end": (lambda past, new, found, at: at(torch.full_like(ANCHORS, len(past) - 1)), ANCHORS < 129),
    "the branch before": (lambda past, new, found, at: new.roll(1, 0)[:, -found.shape[1] :], ANCHORS >= 0),
    "nothing": (lambda past, new, found, at: torch.zeros_like(found), ANCHORS >= 0),
}


@LINEAR
@pytest.mark.parametrize("name", PLACES)
def test_convolution_context_from_the_wrong_place(kind, name, monkeypatch) -> None:
    place, wrong = PLACES[name]
    misplace(monkeypatch, "mixed", place)
    check(kind, wrong)


@pytest.mark.parametrize("what", ["ids", "short"])
def test_n_gram_state_of_the_stems_end(what, monkeypatch) -> None:
    """qwen4_exp: the last tokens (`ids`), and what its short convolution reaches back to."""
    place, wrong = PLACES["the stem's end"]
    misplace(monkeypatch, what, place)
    check("qwen4_exp", wrong)


def test_n_gram_state_of_token_0_before_the_text(monkeypatch) -> None:
    """Before the text begins there are end tokens, not token 0."""
    honest = NodesPart.before
    monkeypatch.setattr(NodesPart, "before", lambda self, key, values, width, fill=0: honest(self, key, values, width, 0))
    check("qwen4_exp", ANCHORS == 0)
