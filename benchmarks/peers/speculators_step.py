"""A training step of speculators 0.9: `DSparkDraftModel` / `DFlashDraftModel`, eager losses (its fused ones are Triton)."""

from __future__ import annotations

from importlib.metadata import version

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from step import Contender, Inputs, Task, autocast, qwen3_fields, serve, trained
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

# its `tv` has a half in it, so 0.9 * sum |p - q| is weight 1.8; its CE reads the target's argmax, not the data token
DSPARK_LOSS, DFLASH_LOSS = '{"ce": 0.1, "tv": 1.8}', "ce"


def build(task: Task, inputs: Inputs) -> Contender:
    dspark = task.drafter == "dspark"
    shape = {
        "transformer_layer_config": Qwen3Config(**qwen3_fields(task)),
        "draft_vocab_size": task.vocab,
        "block_size": task.block_size,
        "aux_hidden_state_layer_ids": list(range(task.taps)),
        "mask_token_id": task.mask_token,
    }
    if dspark:
        model = DSparkDraftModel(DSparkSpeculatorConfig(**shape, markov_rank=task.markov_rank))
    else:
        model = DFlashDraftModel(DFlashSpeculatorConfig(**shape))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(inputs.embedding)
        model.lm_head.weight.copy_(inputs.head)
        model.verifier_lm_head.weight.copy_(inputs.head)
    model.train()
    options: dict[str, object] = {"loss_config": resolve_loss_config(DSPARK_LOSS if dspark else DFLASH_LOSS, "eager")}
    if dspark:
        options |= {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0], "confidence_head_alpha": 1.0}
    batch = {
        "hidden_states": inputs.taps.flatten(-2),
        "input_ids": inputs.input_ids,
        "loss_mask": inputs.loss_mask,
        "verifier_last_hidden_states": inputs.last,
        "document_ids": torch.zeros_like(inputs.input_ids),
    }

    blocks = min(task.anchors, task.context - task.block_size)  # its anchors leave room for a whole block

    def forward() -> tuple[torch.Tensor, float]:
        with autocast(task):
            _, loss, _ = model(**batch, gamma=task.decay, max_anchors=task.anchors, **options)
        return loss, float(blocks * task.draft_tokens)

    return Contender(trained(model), forward)


if __name__ == "__main__":
    serve(build, {"speculators": version("speculators"), "transformers": version("transformers")})
