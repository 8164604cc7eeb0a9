"""A training step of SpecForge 0.2: `OnlineDSparkModel` / `OnlineDFlashModel`, objective in checkpointed chunks of 128 blocks."""

from __future__ import annotations

import warnings
from importlib.metadata import version

import torch
from step import Contender, Inputs, Task, autocast, qwen3_fields, serve, trained
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

warnings.filterwarnings("ignore", message="flash_attn is not found")

from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel  # noqa: E402
from specforge.modeling.draft.dflash import DFlashDraftModel  # noqa: E402
from specforge.modeling.draft.dspark import DSparkDraftModel  # noqa: E402


def frozen(inputs: Inputs) -> tuple[nn.Linear, nn.Embedding]:
    """The target's head and embedding as modules."""
    head = nn.Linear(inputs.head.shape[1], inputs.head.shape[0], bias=False)
    head.weight = nn.Parameter(inputs.head, requires_grad=False)
    return head, nn.Embedding.from_pretrained(inputs.embedding)


def build(task: Task, inputs: Inputs) -> Contender:
    dspark = task.drafter == "dspark"
    options = {"target_layer_ids": list(range(task.taps)), "mask_token_id": task.mask_token}
    if dspark:
        options |= {"markov_rank": task.markov_rank, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}
        options |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    config = Qwen3Config(**qwen3_fields(task), block_size=task.block_size, num_target_layers=30, dflash_config=options)
    draft = (DSparkDraftModel if dspark else DFlashDraftModel)(config).train()
    head, embedding = frozen(inputs)
    model = (OnlineDSparkModel if dspark else OnlineDFlashModel)(
        draft,
        head,
        embedding,
        mask_token_id=task.mask_token,
        block_size=task.block_size,
        attention_backend="sdpa",
        num_anchors=task.anchors,
        loss_decay_gamma=task.decay,
    )
    batch = {"input_ids": inputs.input_ids, "hidden_states": inputs.taps.flatten(-2), "loss_mask": inputs.loss_mask.float()}
    if dspark:
        batch["target_last_hidden_states"] = inputs.final

    def forward() -> tuple[torch.Tensor, float]:
        with autocast(task):
            loss, _, metrics = model(**batch)
        return loss, float(metrics["accuracy_denom"] if not dspark else metrics["ratio_metrics"]["acc"][1])

    return Contender(trained(model), forward)


if __name__ == "__main__":
    serve(build, {"specforge": version("specforge"), "transformers": version("transformers")})
