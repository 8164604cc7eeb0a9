"""A training step of ours: `distill.objective` on one text; mode "eager" does without compiled
passes, as runs of fewer than 300 steps do; mode "layers" compiles the MLPs of the draft layers too (`train.compile`); mode "naive" swaps in
losses that hold whole [rows, V] logits."""

from __future__ import annotations

from typing import Any

import torch
from step import Contender, Inputs, Task, serve, trained

import specgraft.distill.objective as stage
from specgraft.config import DistillSection
from specgraft.distill.anchors import draw_anchors
from specgraft.distill.batch import Batch
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Texts
from specgraft.drafters.layers import RMSNorm
from specgraft.drafters.registry import build as new_drafter
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.naive import Rows, SlotLosses


def whole_losses(
    rows: Rows, head: torch.Tensor, markov: torch.Tensor | None, weights: dict[str, torch.Tensor], compute: torch.dtype, **_: Any
) -> tuple[torch.Tensor, SlotLosses, None]:
    """`weighted_losses` as `ops/vocab_loss/naive.py` defines it, without the losses that nobody asked for: plain autograd."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == torch.bfloat16):
        logits = rows.hidden @ head.T
        if rows.latent is not None and markov is not None:
            latent = rows.latent if rows.latent_row is None else rows.latent[rows.latent_row]
            logits = logits + latent @ markov.T
        log_q = logits.float().log_softmax(-1)
        ce = -log_q.gather(-1, rows.labels[:, None])[:, 0]
        if rows.target_hidden is None:
            return (weights["ce"] * ce).sum(), SlotLosses(ce.detach()), None
        target = rows.target_hidden if rows.source is None else rows.target_hidden[rows.source]
        p = (target @ head.T).float().softmax(-1)
    l1 = (p - log_q.exp()).abs().sum(-1)
    hit = (log_q.argmax(-1) == p.argmax(-1)).float()
    values = SlotLosses(ce.detach(), l1=l1.detach(), tv=l1.detach() / 2, alpha=1 - l1.detach() / 2, hit=hit)
    return (weights["ce"] * ce).sum() + (weights["l1"] * l1).sum(), values, None


def config_of(task: Task) -> DrafterConfig:
    dspark = task.drafter == "dspark"
    return DrafterConfig(
        kind=task.drafter,
        draft_tokens=task.draft_tokens,
        layers=task.layers,
        hidden_size=task.hidden,
        vocab_size=task.vocab,
        heads=task.heads,
        kv_heads=task.kv_heads,
        head_dim=task.head_dim,
        intermediate=task.intermediate,
        eps=1e-6,
        rope_theta=10000.0,
        max_positions=8192,
        taps=tuple(range(task.taps)),
        target_layers=30,
        mask_token_id=task.mask_token,
        markov_rank=task.markov_rank if dspark else 0,
        confidence=dspark,
    )


def build(task: Task, inputs: Inputs) -> Contender:
    if task.mode == "naive":
        stage.weighted_losses = whole_losses  # type: ignore[assignment]
    drafter = new_drafter(config_of(task)).train()
    if task.mode == "layers":
        for layer in drafter.layers:
            layer.mlp.compile(dynamic=True)
    shared = Shared(inputs.embedding, inputs.head, RMSNorm(task.hidden, 1e-6).requires_grad_(False), task.mask_token)
    starts, mask = torch.zeros_like(inputs.input_ids), inputs.loss_mask.bool()
    texts, generator = Texts(inputs.input_ids, inputs.taps, starts), torch.Generator().manual_seed(task.seed)
    options = DistillSection(fused="on" if task.mode in ("", "layers") else "off")
    compute = torch.bfloat16 if task.precision == "bf16" else torch.float32

    def forward() -> tuple[torch.Tensor, float]:
        anchors = draw_anchors(mask, starts, task.anchors, task.draft_tokens, generator)
        out = stage.objective(drafter, shared, Batch(texts, inputs.last, anchors), options, compute)
        return out.loss, float(anchors.mask.sum())

    return Contender(trained(drafter), forward)


if __name__ == "__main__":
    serve(build, {})
