"""What the target says at the nodes of proposal trees: a stem computed once, any number of trees behind it.

The stem's pass keeps what branches need (attention keys and values, recurrent states every `chunk` tokens, the last inputs of
convolutions, indexer groups); a branch starts from the state at its anchor, so nothing re-runs a prefix (targets.md 2 and 3).
Legend: S stem tokens, N branches, W tokens a branch, K taps, D hidden size, E width of the last layer's output (D, or all streams).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specgraft.records import ProposalTree, TargetScores
from specgraft.targets.model import Target
from specgraft.targets.parts import StemPart, tree_work

# ids [S] of each stem and one tree on each -> the states at the nodes; in this process (`scorer`) or elsewhere
Scorer = Callable[[Sequence[torch.Tensor], Sequence[ProposalTree]], list[TargetScores]]


@dataclass(frozen=True)
class Stem:
    """A prefilled text. Filled by `prefill`."""

    taps: torch.Tensor | None  # [S, K, D]
    last: torch.Tensor  # [S, E]
    part: StemPart


def prefill(target: Target, ids: torch.Tensor, taps: Sequence[int] = ()) -> Stem:
    """Runs ids [S] once. Raises ValueError for an empty text or a layer id that does not exist."""
    if not len(ids):
        raise ValueError("an empty stem: a tree needs at least one token before it")
    part = StemPart(len(ids))
    step = target.run(tree_work(ids.to(target.device), None, part), taps)
    return Stem(None if step.taps is None else step.taps[0], step.last[0], part)


def score(target: Target, stem: Stem, tree: ProposalTree) -> TargetScores:
    """States at the nodes of `tree` behind a stem that was prefilled; the stem stays as it is."""
    check(tree, stem.part.length)
    count, width = tree.branches.shape
    if not count * width:
        return TargetScores(stem.last.new_zeros(count, width, stem.last.shape[-1]))
    step = target.run(tree_work(None, tree.to(target.device), stem.part))
    return TargetScores(step.last[0].unflatten(0, (count, width)))


def score_packed(target: Target, ids: torch.Tensor, tree: ProposalTree, taps: Sequence[int] = ()) -> tuple[Stem, TargetScores]:
    """`prefill` and `score` in one pass over S + N*W tokens."""
    check(tree, len(ids))
    count, width = tree.branches.shape
    if not count * width:
        stem = prefill(target, ids, taps)
        return stem, score(target, stem, tree)
    part = StemPart(len(ids))
    step = target.run(tree_work(ids.to(target.device), tree.to(target.device), part), taps)
    stem = Stem(None if step.taps is None else step.taps[0, : len(ids)], step.last[0, : len(ids)], part)
    return stem, TargetScores(step.last[0, len(ids) :].unflatten(0, (count, width)))


def scorer(target: Target) -> Scorer:
    """A target in this process as the function that on-policy training asks (`distill.onpolicy`)."""

    def ask(stems: Sequence[torch.Tensor], trees: Sequence[ProposalTree]) -> list[TargetScores]:
        return [score_packed(target, ids, tree)[1] for ids, tree in zip(stems, trees, strict=True)]

    return ask


def check(tree: ProposalTree, length: int) -> None:
    """Raises ValueError for a tree that does not grow on a stem of this length."""
    if tree.stem != length:
        raise ValueError(f"the tree was made for a stem of {tree.stem} tokens and this one has {length}")
    if tree.branches.dim() != 2 or tree.anchors.shape != tree.branches.shape[:1]:
        raise ValueError(f"branches {list(tree.branches.shape)} need one anchor each, there are {list(tree.anchors.shape)}")
    if len(tree.anchors) and not 0 <= int(tree.anchors.min()) <= int(tree.anchors.max()) < length:
        raise ValueError(f"anchors lie on the stem, 0 to {length - 1}: {int(tree.anchors.min())} to {int(tree.anchors.max())} were given")
