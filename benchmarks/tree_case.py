"""A tree to score, and the same tokens run in other ways: what `tree_scoring.py` compares.

Legend: S stem tokens, N branches, W tokens a branch, B rows and L tokens of a plain forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from doubled import doubled
from specgraft.records import ProposalTree
from specgraft.targets.attention import NAME
from specgraft.targets.model import Target
from specgraft.targets.parts import StemPart, tree_work
from specgraft.targets.scoring import prefill, score, score_packed

PADDED = 8  # rows of similar length in one pass of the batched re-execution


@dataclass(frozen=True)
class Case:
    """One target, one tree, and Hugging Face's own model with the same weights."""

    target: Target
    plain: Any
    ids: torch.Tensor  # [S]
    tree: ProposalTree

    def score(self) -> None:
        score_packed(self.target, self.ids, self.tree)

    def whole(self) -> torch.Tensor:
        """[S + N*W]: as many tokens, as one text."""
        return torch.cat([self.ids, self.tree.branches.flatten()])

    def texts(self) -> list[torch.Tensor]:
        """What re-execution runs: the stem up to the anchor and the branch, for every branch."""
        return [
            torch.cat([self.ids[: int(anchor) + 1], branch])
            for anchor, branch in zip(self.tree.anchors, self.tree.branches, strict=True)
        ]

    def ours(self, ids: torch.Tensor) -> None:
        self.target.run(tree_work(ids, None, StemPart(len(ids))))

    @torch.inference_mode()
    def theirs(self, ids: torch.Tensor) -> None:
        """ids [B, L], lengths alike or padded behind, which causal layers do not see."""
        self.plain.base_model(input_ids=ids, use_cache=False)

    def one_by_one(self, forward: Callable[[torch.Tensor], None]) -> None:
        for text in self.texts():
            forward(text)

    def batched(self) -> None:
        texts = sorted(self.texts(), key=len)
        for first in range(0, len(texts), PADDED):
            self.theirs(torch.nn.utils.rnn.pad_sequence(texts[first : first + PADDED], batch_first=True))


def draw(target: Target, stem: int, anchors: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ProposalTree]:
    """Random ids, and one anchor in each of `anchors` equal stretches of the stem, so that no draw is a lucky one."""
    random = torch.Generator().manual_seed(seed)
    place = (torch.arange(anchors) + torch.rand(anchors, generator=random)) * stem / anchors
    ids, branches = (
        torch.randint(0, target.vocab_size, shape, generator=random).to(target.device) for shape in ((stem,), (anchors, width))
    )
    return ids, ProposalTree(stem, place.long().clamp_max(stem - 1).to(target.device), branches)


def error_fp64(case: Case, stem: int, anchors: int, width: int) -> float:
    """Largest difference in logits, in float64, between the tree's scores and Hugging Face's forward over every branch's text."""
    theirs, device = doubled(case.plain, "eager"), case.target.device
    ours = Target(doubled(case.plain, NAME), case.target.tokenizer, case.target.path, device)
    ids, tree = draw(ours, stem, anchors, width, seed=1)
    ends = torch.tensor([0, stem - 1], device=device)
    tree = ProposalTree(stem, torch.cat([ends, tree.anchors])[:anchors], tree.branches)
    small = Case(ours, theirs, ids, tree)
    with torch.inference_mode():
        wanted = torch.stack([theirs(input_ids=text[None], use_cache=False).logits[0, -width:] for text in small.texts()])
        found = [score_packed(ours, ids, tree)[1], score(ours, prefill(ours, ids), tree)]
        return max((ours.head(ours.final_norm(scores.hidden)) - wanted).abs().max().item() for scores in found)
