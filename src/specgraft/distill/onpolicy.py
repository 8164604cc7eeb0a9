"""SpecOPD: the end-to-end objective on the drafter's own proposals, scored by the target (algorithms.md 3.8).

Legend: B rows, N anchors, K branches an anchor, G draft tokens, D hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from specgraft.config import DistillSection
from specgraft.distill.batch import Batch
from specgraft.distill.branches import Drawn, branch_blocks, graft, grow, score_branches
from specgraft.distill.objective import Outcome, forward, learn, refuse_idle
from specgraft.distill.weights import decay_weights
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.targets.scoring import Scorer


def onpolicy(
    drafter: Drafter,
    shared: Shared,
    batch: Batch,
    options: DistillSection,
    score: Scorer,
    end_ids: Sequence[int],
    compute: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
    known: Mapping[str, torch.Tensor] | None = None,
    drawn: Drawn | None = None,
) -> Outcome:
    """The loss of one batch on branches at its anchors (`anchors.branch_anchors`), drawn anew from the drafter as it is.

    `score` gives the target's states at the nodes; end_ids: tokens behind which a branch is over. Branches and the target's
    laws are constants: gradients go through the drafter's laws and the prefix products. `compute` and `known` as in `objective`;
    `drawn`: branches that have been drawn already, by these weights (`counting`) or by those of an earlier step (`train.ahead`).
    """
    options.check_origin(drafter.config.kind)
    refuse_idle(drafter, options)
    clock, many = Clock(batch.last.device), options.branches_per_anchor
    hidden = forward(drafter, shared, batch, compute)  # [B,N,G,D]: blocks read no drafted token, so that one pass serves all
    if many > 1:
        hidden = hidden.repeat_interleave(many, 1)
    clock.lap("learn")
    if drawn is None:
        drawn = Drawn(grow(drafter, shared, batch, hidden, many, options.branch_temperature, options.chunk_rows, compute, generator))
    clock.lap("sample")
    nodes = scored(batch, drawn.tokens, options, score) if drawn.nodes is None else drawn.nodes()
    clock.lap("score")
    blocks = branch_blocks(batch, drawn.tokens, nodes, many, end_ids)
    outcome = learn(drafter, shared, blocks, hidden, slot_weights(drafter, batch, options, compute), options, compute, own=True, known=known)
    clock.lap("learn")
    return replace(outcome, seconds=clock.seconds)


@torch.no_grad()
def draw(
    drafter: Drafter, shared: Shared, batch: Batch, options: DistillSection, compute: torch.dtype, generator: torch.Generator | None
) -> torch.Tensor:
    """Tokens [B,M,W] of the branches that `onpolicy` would draw."""
    many = options.branches_per_anchor
    hidden = forward(drafter, shared, batch, compute).repeat_interleave(many, 1)
    return grow(drafter, shared, batch, hidden, many, options.branch_temperature, options.chunk_rows, compute, generator)


def slot_weights(drafter: Drafter, batch: Batch, options: DistillSection, compute: torch.dtype) -> torch.Tensor:
    """[G] fixed weights of the slots of a branch; whole precision also where products have half."""
    return decay_weights(drafter.config.draft_tokens, options.decay).to(batch.last.device, torch.promote_types(compute, torch.float32))


def scored(batch: Batch, tokens: torch.Tensor, options: DistillSection, score: Scorer) -> torch.Tensor:
    """The target's states [B,M,W,D] at the nodes of branches tokens [B,M,W]."""
    return score_branches(graft(batch, tokens, options.branches_per_anchor), score, tokens, batch.last)


class Clock:
    """Seconds by what was done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict.fromkeys(("sample", "score", "learn"), 0.0)
        self.began = self.now()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def lap(self, name: str) -> None:
        """What passed since the last lap was `name`."""
        now = self.now()
        self.seconds[name] += now - self.began
        self.began = now
