"""What the trainer's own forward says of every slot, without a graph.

Legend: B rows, N anchors, G draft tokens.
"""

from __future__ import annotations

import torch

from specgraft.distill.batch import Batch, supervised
from specgraft.distill.objective import forward, slot_inputs
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import weighted_losses


@torch.no_grad()
def slot_statistics(
    drafter: Drafter, shared: Shared, batch: Batch, compute: torch.dtype, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and greedy hit of every slot, [B,N,G]; 0 where a slot is not supervised."""
    mask = batch.anchors.mask
    slots = supervised(batch, mask)
    inputs = slot_inputs(drafter, shared, batch, forward(drafter, shared, batch, compute), slots)
    _, losses, _ = weighted_losses(
        inputs.rows, shared.head, inputs.markov, {}, want={"alpha", "hit"}, chunk=chunk, compute=compute
    )
    assert losses.alpha is not None and losses.hit is not None
    return slots.grid(losses.alpha.float(), mask), slots.grid(losses.hit.float(), mask)
