"""Branches scored by the actors that hold the target: ids go out, states at the nodes come back, no weight of the drafter travels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from specgraft.records import ProposalTree, TargetScores
from specgraft.stream.crew import Crew
from specgraft.targets.model import Target
from specgraft.targets.scoring import Scorer, score_packed

Tree = tuple[list[int], list[int], list[list[int]]]  # ids of the stem, anchors, branches


def remote_scorer(crew: Crew, dtype: torch.dtype) -> Scorer:
    """What on-policy training asks (`targets.scoring.Scorer`): trees are dealt out, so that each producer has as many tokens."""
    pool = ThreadPoolExecutor(max_workers=len(crew.members), thread_name_prefix="scoring")

    def ask(stems: Sequence[torch.Tensor], trees: Sequence[ProposalTree]) -> list[TargetScores]:
        sent = [(ids.tolist(), tree.anchors.tolist(), tree.branches.tolist()) for ids, tree in zip(stems, trees, strict=True)]
        shares: list[list[int]] = [[] for _ in crew.members]
        sizes = [0] * len(shares)
        for place in sorted(range(len(sent)), key=lambda place: -work(sent[place])):
            least = sizes.index(min(sizes))
            shares[least].append(place)
            sizes[least] += work(sent[place])
        shares = [share for share in shares if share]
        found: dict[int, TargetScores] = {}
        answers = pool.map(lambda share: crew.ask(scored, [sent[place] for place in share]), shares)
        for share, answer in zip(shares, answers, strict=True):
            for place, (shape, raw) in zip(share, answer, strict=True):
                hidden = torch.from_numpy(raw.copy()).view(dtype).view(shape)
                found[place] = TargetScores(hidden.to(stems[place].device))
        return [found[place] for place in range(len(sent))]

    return ask


def work(tree: Tree) -> int:
    """Tokens of its pass."""
    return len(tree[0]) + sum(map(len, tree[2]))


def scored(target: Target, trees: Sequence[Tree]) -> list[tuple[tuple[int, ...], Any]]:
    """In the actor: shape and bytes of the states at the nodes of every tree."""
    found = []
    for ids, anchors, branches in trees:
        nodes = torch.tensor(branches, dtype=torch.long).view(len(anchors), len(branches[0]) if branches else 0)
        tree = ProposalTree(len(ids), torch.tensor(anchors, dtype=torch.long), nodes)
        hidden = score_packed(target, torch.tensor(ids), tree)[1].hidden.cpu().contiguous()
        found.append((tuple(hidden.shape), hidden.view(-1).view(torch.uint8).numpy()))
    return found
