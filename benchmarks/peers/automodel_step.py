"""A training step of NeMo AutoModel 0.7: `DSparkTrainerModule` / `DFlashTrainerModule` around its Qwen3 drafts."""

from __future__ import annotations

from importlib.metadata import version

import torch
from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
from nemo_automodel.components.speculative.dspark.core import DSparkTrainerModule
from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel
from step import Contender, Inputs, Task, autocast, qwen3_fields, serve, trained
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config


def frozen(inputs: Inputs) -> tuple[nn.Linear, nn.Embedding]:
    """The target's head and embedding as modules."""
    head = nn.Linear(inputs.head.shape[1], inputs.head.shape[0], bias=False)
    head.weight = nn.Parameter(inputs.head, requires_grad=False)
    return head, nn.Embedding.from_pretrained(inputs.embedding)


def config_of(task: Task, **fields: object) -> Qwen3Config:
    """Its config builder asks for flex attention, so the attention is set behind it."""
    config = Qwen3Config(**qwen3_fields(task), block_size=task.block_size, num_target_layers=30, **fields)
    config._attn_implementation = "sdpa"
    return config


def build_dspark(task: Task, inputs: Inputs) -> nn.Module:
    config = config_of(
        task,
        target_layer_ids=list(range(task.taps)),
        mask_token_id=task.mask_token,
        num_anchors=task.anchors,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        markov_rank=task.markov_rank,
        markov_head_type="vanilla",
    )
    draft = Qwen3DSparkModel(config).train()
    head, embedding = frozen(inputs)
    draft.initialize_embeddings_and_head(embed_tokens=embedding, lm_head=head)
    return DSparkTrainerModule(draft, loss_decay_gamma=task.decay)


def build_dflash(task: Task, inputs: Inputs) -> nn.Module:
    options = {"target_layer_ids": list(range(task.taps)), "mask_token_id": task.mask_token, "block_size": task.block_size}
    draft = Qwen3DFlashDraftModel(config_of(task, dflash_config=options)).train()
    head, embedding = frozen(inputs)
    return DFlashTrainerModule(
        draft,
        head,
        embedding,
        mask_token_id=task.mask_token,
        block_size=task.block_size,
        attention_backend="sdpa",
        num_anchors=task.anchors,
        loss_decay_gamma=task.decay,
    )


def build(task: Task, inputs: Inputs) -> Contender:
    dspark = task.drafter == "dspark"
    model = (build_dspark if dspark else build_dflash)(task, inputs)
    taps, mask = inputs.taps.flatten(-2), inputs.loss_mask.float()
    if dspark:
        batch = {"target_hidden_states": taps, "target_last_hidden_states": inputs.final}
    else:
        batch = {"hidden_states": taps}

    def forward() -> tuple[torch.Tensor, float]:
        with autocast(task):
            out = model(input_ids=inputs.input_ids, loss_mask=mask, **batch)
        return out.loss, float(out.accept_rate_per_pos_den.sum() if dspark else out.valid_tokens)

    return Contender(trained(model), forward)


if __name__ == "__main__":
    serve(build, {"nemo-automodel": version("nemo-automodel"), "transformers": version("transformers")})
