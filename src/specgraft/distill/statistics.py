"""What the trainer's own forward says of every slot, without a graph.

Legend: B rows, N anchors, G draft tokens.
"""

from __future__ import annotations

import torch

from specgraft.distill.batch import Batch, references, supervised
from specgraft.distill.objective import forward
from specgraft.distill.parts import slot_inputs
from specgraft.distill.selector import candidates_of
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.selector_loss.chunked import weighted_selector_losses
from specgraft.ops.vocab_loss.chunked import weighted_losses


@torch.no_grad()
def slot_statistics(
    drafter: Drafter, shared: Shared, batch: Batch, compute: torch.dtype, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and greedy hit of every slot under the law that drafts, [B,N,G]; 0 where a slot is not supervised."""
    blocks, mask = references(batch), batch.anchors.mask
    slots = supervised(blocks)
    inputs = slot_inputs(drafter, shared, blocks, forward(drafter, shared, batch, compute), slots)
    rows, selector = inputs.rows, drafter.selector
    top_k, wanted = (0, {"alpha", "hit"}) if selector is None else (selector.top_k, set())
    _, losses, top = weighted_losses(rows, shared.head_as(compute), inputs.markov, {}, want=wanted, chunk=chunk, compute=compute, top_k=top_k)
    alpha, hit = losses.alpha, losses.hit
    if selector is not None and top is not None:
        before = slots.before[slots.source]
        candidates = candidates_of(selector, rows, before, top, shared.head, False, chunk, compute)
        _, chosen = weighted_selector_losses(candidates, shared.head, selector.successor_codebook, {}, chunk)
        alpha, hit = chosen.alpha, chosen.hit
    assert alpha is not None and hit is not None
    return slots.grid(alpha.float(), mask), slots.grid(hit.float(), mask)
