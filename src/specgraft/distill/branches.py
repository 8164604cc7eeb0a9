"""The drafter's own proposals at the anchors of a step, and the trees in which the target scores them (algorithms.md 3.8).

Legend: B rows, T tokens, N anchors, K branches an anchor, M = N K branches of a row, G draft tokens, W = G-1 nodes a branch,
S tokens of a stem, D hidden size, V vocabulary, R branches of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specgraft.distill.batch import Batch, Blocks
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import Corrector
from specgraft.ops.sampling import distribution, draw
from specgraft.ops.vocab_loss.products import Products
from specgraft.records import ProposalTree
from specgraft.targets.scoring import Scorer


@torch.no_grad()
def sample_branches(
    drafter: Drafter,
    shared: Shared,
    hidden: torch.Tensor,
    anchor_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float = 1.0,
    chunk: int = 128,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """d_1..d_W [R,W] from states hidden [R,G,D] behind anchors [R], left to right as in decoding (`drafters.walk`).

    uniforms [R,W] in [0,1); `compute` is the dtype of the head's products. [chunk,V] logits exist at once: a slot of `chunk`
    branches. d_G, which no slot follows, is not drawn.
    """
    products = Products(torch.float64 if torch.float64 in (compute, hidden.dtype) else compute, hidden.device)
    head, chunk = shared.head_as(products.kind).to(products.kind), max(1, min(chunk, len(hidden)))
    logits = hidden.new_empty((chunk, head.shape[0]), dtype=products.result)
    drawn = torch.empty(uniforms.shape, dtype=torch.long, device=hidden.device)
    for first in range(0, len(hidden), chunk):
        here = slice(first, first + chunk)
        previous, correct = anchor_ids[here], Corrector(drafter)
        for slot in range(uniforms.shape[1]):
            state = hidden[here, slot]
            own, _ = correct(products.rows(state, head, logits), state, previous)
            previous = draw(distribution(own, temperature), uniforms[here, slot])
            drawn[here, slot] = previous
    return drawn


def grow(
    drafter: Drafter,
    shared: Shared,
    batch: Batch,
    hidden: torch.Tensor,
    branches_per_anchor: int,
    temperature: float,
    chunk: int,
    compute: torch.dtype,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Tokens [B,M,W] of branches drawn from the drafter as it is, states hidden [B,M,G,D]; 0 where an anchor is not kept.

    Branch n K + k grows at anchor n. The generator is one of the CPU, so that a device draws what another does.
    """
    size, anchors = hidden.shape[2], batch.anchors
    position, keep = (each.repeat_interleave(branches_per_anchor, 1) for each in (anchors.position, anchors.keep))
    uniforms = batch.uniforms(branches_per_anchor, size - 1, generator, torch.float64).to(hidden.device)
    tokens = torch.zeros(uniforms.shape, dtype=torch.long, device=hidden.device)
    before = batch.texts.input_ids.gather(1, position)
    tokens[keep] = sample_branches(drafter, shared, hidden.detach()[keep], before[keep], uniforms[keep], temperature, chunk, compute)
    return tokens


@dataclass(frozen=True)
class Drawn:
    """Branches that were drawn before the pass that learns from them."""

    tokens: torch.Tensor  # [B, M, W]
    nodes: Callable[[], torch.Tensor] | None = None  # gives the target's states at them [B, M, W, D], or waits; None: not asked for yet


@dataclass(frozen=True)
class Graft:
    """The branches of one document. Filled by `graft`."""

    row: int
    members: torch.Tensor  # [n] places in 0..M-1 of its branches
    stem: torch.Tensor  # [S] its tokens up to the last anchor; no branch sees more
    tree: ProposalTree


def graft(batch: Batch, tokens: torch.Tensor, branches_per_anchor: int) -> list[Graft]:
    """A tree for every document that has anchors: branches tokens [B,M,W], anchors counted from the document's start."""
    anchors, texts, found = batch.anchors, batch.texts, []
    starts = texts.starts.gather(1, anchors.position).masked_fill(~anchors.keep, -1)
    starts, places = (each.repeat_interleave(branches_per_anchor, 1) for each in (starts, anchors.position))
    for row, mine in enumerate(starts):
        for start in mine[mine >= 0].unique().tolist():
            members = (mine == start).nonzero()[:, 0]
            at = places[row, members] - start
            stem = texts.input_ids[row, start : start + int(at.max()) + 1]
            found.append(Graft(row, members, stem, ProposalTree(len(stem), at, tokens[row, members])))
    return found


@torch.no_grad()
def score_branches(grafts: Sequence[Graft], score: Scorer, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """States [B,M,W,D] of the target at all nodes, in the dtype of last [B,T,D]; 0 where there is no branch."""
    nodes = last.new_zeros(*tokens.shape, last.shape[-1])
    if not grafts or not tokens.shape[2]:
        return nodes
    scores = score([each.stem for each in grafts], [each.tree for each in grafts])
    if len(scores) != len(grafts):
        raise ValueError(f"the scorer was asked for {len(grafts)} trees and answered {len(scores)}")
    for each, one in zip(grafts, scores, strict=True):
        wanted = (*each.tree.branches.shape, last.shape[-1])
        if tuple(one.hidden.shape) != wanted:
            raise ValueError(f"the scorer gave states of shape {tuple(one.hidden.shape)} for a tree that needs {wanted}")
        nodes[each.row, each.members] = one.hidden.to(nodes)
    return nodes


def branch_mask(batch: Batch, tokens: torch.Tensor, branches_per_anchor: int, end_ids: Sequence[int]) -> torch.Tensor:
    """[B,M,G] bool: the slots of branches tokens [B,M,W] that are supervised. Behind a drafted end token the text is over."""
    keep = batch.anchors.keep.repeat_interleave(branches_per_anchor, 1)
    over = torch.isin(tokens, torch.tensor(end_ids, dtype=torch.long, device=tokens.device)).cumsum(-1) > 0
    return keep[..., None] & ~F.pad(over, (1, 0))


def branch_blocks(
    batch: Batch, tokens: torch.Tensor, nodes: torch.Tensor, branches_per_anchor: int, end_ids: Sequence[int]
) -> Blocks:
    """Branches tokens [B,M,W] with states nodes [B,M,W,D] as blocks: p_1 is the text's, at the anchor; p_{j+1} that of node j."""
    anchors, (rows, branches, _), device = batch.anchors, tokens.shape, tokens.device
    count = anchors.position.shape[1]
    position = anchors.position.repeat_interleave(branches_per_anchor, 1)
    before = batch.texts.input_ids.gather(1, position)[..., None]
    row = torch.arange(rows, device=device)[:, None]
    at_anchor = (row * count + torch.arange(branches, device=device) // branches_per_anchor)[..., None]
    at_node = rows * count + torch.arange(tokens.numel(), device=device).view_as(tokens)
    stem = batch.last.gather(1, anchors.position[..., None].expand(-1, -1, batch.last.shape[2]))
    return Blocks(
        mask=branch_mask(batch, tokens, branches_per_anchor, end_ids),
        tokens=torch.cat([before, tokens, torch.zeros_like(before)], -1),
        states=torch.cat([stem.flatten(0, 1), nodes.flatten(0, 2)]),
        places=torch.cat([at_anchor, at_node], -1),
    )
