"""What the trainer's own forward says of every slot, without a graph.

Legend: B rows, N anchors, G draft tokens.
"""

from __future__ import annotations

import torch

from specgraft.distill.offpolicy import Batch, block_hidden
from specgraft.drafters.dspark import DSpark
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.chunked import compound


@torch.no_grad()
def slot_statistics(
    drafter: DSpark, shared: Shared, batch: Batch, compute: torch.dtype, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and greedy hit of every slot, [B,N,G]; 0 where a slot is not supervised."""
    device = batch.input_ids.device
    with torch.autocast(device.type, dtype=compute, enabled=compute not in (torch.float32, torch.float64)):
        hidden = block_hidden(drafter, shared, batch)
    row, block, slot = batch.anchors.mask.nonzero(as_tuple=True)
    source = batch.anchors.position[row, block] + slot
    final = shared.final_norm(batch.last[row, source])
    zero = torch.zeros(len(row), device=device)
    _, losses = compound(
        hidden[row, block, slot], drafter.embed_previous(batch.input_ids[row, source]), final,
        batch.input_ids[row, source + 1], shared.head, drafter.markov_head.markov_w2.weight, zero, zero, chunk, compute,
    )  # fmt: skip
    alpha, hit = (torch.zeros(batch.anchors.mask.shape, device=device) for _ in range(2))
    alpha[row, block, slot] = losses.alpha.float()
    hit[row, block, slot] = losses.hit.float()
    return alpha, hit
