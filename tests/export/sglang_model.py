"""What SGLang's own classes make of an exported folder or of a target, on a CPU in float32. Imported by `sglang_load` alone.

SGLang's paged attention kernels are replaced by plain attention over stored context and block, with the causality and the
window that each of its layers was built with; everything else is its own code: config parser, loader, layers, heads.
Legend: T context tokens, K taps, D hidden size, V vocabulary, S slots, G drafts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig, _get_and_verify_dtype
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models import dflash, dspark, llama, qwen3
from sglang.srt.models.gemma4_causal import Gemma4TextScaledWordEmbedding
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components.dspark_config import resolve_runtime_config
from sglang.srt.utils.hf_transformers.config import get_config

dflash._flashinfer_top_k = None  # a stub here; SGLang itself then takes torch.topk
GROUPS = ("tp_group", "pp_group", "attn_tp_group", "attn_cp_group", "moe_ep_group", "moe_tp_group", "moe_dp_group")
FUSED = (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"))


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """SGLang's global state as a server of the model in `folder` without any parallelism has it."""
    runtime_context.publish(ServerArgs(model_path=str(folder), device="cpu"), role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    group = MagicMock(world_size=1, rank=0, rank_in_group=0, local_rank=0, is_first_rank=True, is_last_rank=True)
    group.all_gather = lambda tensor, *args, **kwargs: tensor
    with runtime_context.get_parallel().override(**dict.fromkeys(GROUPS, group)), torch.no_grad():
        yield


def poisoned(model: Any) -> Any:
    """The model in float32, every parameter NaN: what stays NaN was not loaded."""
    model = model.to(torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def loaded(folder: Path, classes: tuple[type, ...]) -> tuple[Any, dict[str, Any]]:
    """The class that `architectures` names, filled by its own `load_weights`; and which names were not filled, not used."""
    config = get_config(str(folder), trust_remote_code=False)
    known = {entry.__name__: entry for entry in classes}
    if (name := config.architectures[0]) not in known:
        raise ValueError(f"no model class for architecture {name}")
    model = poisoned(known[name](config=config))
    rows = {key: value.float() if value.is_floating_point() else value for key, value in safetensors_weights_iterator([str(folder / "model.safetensors")])}
    model.load_weights(iter(rows.items()))
    names = dict(model.named_parameters())
    unused = []
    for key in rows:
        fused = key
        for part, whole in FUSED:
            fused = fused.replace(f".{part}.", f".{whole}.")
        if key not in names and fused not in names:
            unused.append(key)
    unloaded = [key for key, value in names.items() if not torch.isfinite(value).all()]
    return model, {"class": name, "unloaded": unloaded, "unused": sorted(unused)}


class Attend(torch.nn.Module):
    """In place of a layer's `RadixAttention`: the keys it may read are those of SGLang's kernels for such a layer
    (flashattention_backend.py: window to the left, and to the right where not causal)."""

    def __init__(self, own: Any, context: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        super().__init__()
        attention = own.attn
        self.heads, self.kv_heads, self.size = own.num_heads, own.num_kv_heads, own.head_dim
        self.causal = attention.attn_type not in (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)
        self.attn_type, self.window = attention.attn_type, attention.sliding_window_size
        self.layer_id = attention.layer_id
        self.context = context

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = len(q)
        q, k, v = q.reshape(rows, self.heads, -1), k.reshape(rows, self.kv_heads, -1), v.reshape(rows, self.kv_heads, -1)
        if self.context is not None:
            k, v = torch.cat([self.context[0], k]), torch.cat([self.context[1], v])
        ahead = torch.arange(len(k))[None] - (len(k) - rows + torch.arange(rows)[:, None])  # key behind the query: > 0
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None and self.window > -1:
            seen &= ahead.abs() <= self.window
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen[None, None], enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(rows, -1)


def block(model: Any, taps: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """States [S,D] of one block of input embeddings [S,D] behind taps [T,K*D], as the workers run it."""
    length = len(taps)
    context = model.project_target_hidden(taps)
    for layer in model.layers:
        own = layer.self_attn
        key, value = own.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
        key = own.apply_k_rope(torch.arange(length), own.apply_k_norm(key))
        own.attn = Attend(own, (key.reshape(length, own.num_kv_heads, -1), value.reshape(length, own.num_kv_heads, -1)))
    ids = torch.zeros(len(states), dtype=torch.long)
    return model(ids, length + torch.arange(len(states)), None, input_embeds=states).hidden_states


def head_of(weight: torch.Tensor) -> Any:
    """The target's output matrix [V,D] as the draft models see it."""
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    head.quant_method, head.org_vocab_size, head.tp_size = None, len(weight), 1
    return head


def captured(folder: Path, layers: list[int], ids: torch.Tensor) -> torch.Tensor:
    """[T, K*D]: what the target in `folder` hands a drafter that asks for these layers, columns as they come."""
    model, found = loaded(folder, (llama.LlamaForCausalLM, qwen3.Qwen3ForCausalLM))
    assert not found["unloaded"], found
    for layer in model.model.layers:
        layer.self_attn.attn = Attend(layer.self_attn)
    model.set_dflash_layers_to_capture(layers)
    length = len(ids)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=ids, req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([length]), out_cache_loc=torch.arange(length), seq_lens_sum=length,
    )  # fmt: skip
    return pack_aux_hidden_states(model.model(ids, torch.arange(length), batch)[1])


def draft(job: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One round behind a context, greedy: states of the proposing slots, logits of every draft, drafts, confidence.

    `target`, if there: the folder whose states are read, for tokens `ids`; else states are given as `taps` [T, K*D].
    """
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = job.get("mode", "cap-accept")  # static builds no confidence head
    model, found = loaded(Path(job["folder"]), (*dflash.EntryClass, *dspark.EntryClass))
    if "target" in job:
        layers = model.draft_config.resolve_target_layer_ids(target_num_layers=model.draft_config.num_target_layers)
        given["taps"] = found["taps"] = captured(Path(job["target"]), layers, given["ids"])
    kinds = [layer.self_attn.attn for layer in model.layers]
    found["attention"] = [[kind.attn_type.value, kind.sliding_window_size] for kind in kinds]
    embedding, head = given["embedding"], head_of(given["head"])
    anchor = given["anchor"].view(1)
    if isinstance(model, dspark.DSparkDraftMixin):
        return found | dspark_round(model, given["taps"], embedding, head, anchor)
    size = model.block_size
    mask = model.draft_config.mask_token_id
    states = embedding[torch.cat([anchor, torch.full((size - 1,), mask)])]
    hidden = block(model, given["taps"], states)[1:]  # slot 0 proposes nothing (dflash_worker_v2.py:2801)
    found |= {"drafts": size - 1, "hidden": hidden}
    if model.candidate_selector is None:
        logits = hidden @ head.weight.T
        return found | {"logits": logits, "tokens": logits.argmax(-1)}
    model.lm_head = head
    ids, unary = model.compute_candidates(hidden)
    scores = model.candidate_selector.build_lattice(
        candidate_ids=ids[None], unary_logits=unary[None], hidden_states=hidden[None], anchor_token_ids=anchor
    )
    greedy, ones = torch.ones(1, dtype=torch.bool), torch.ones(1)
    tokens, _ = model.candidate_selector.sample_path(
        candidate_ids=ids[None], scores=scores, uniforms=torch.zeros(1, size - 1), temperatures=ones, greedy_mask=greedy
    )
    logits = torch.full((size - 1, len(embedding)), -1e30)
    before = torch.zeros(1, dtype=torch.long)
    for slot in range(size - 1):
        logits[slot, ids[slot]] = scores[0, slot, before[0]]
        before = (ids[slot] == tokens[0, slot]).nonzero()[0]
    return found | {"logits": logits, "tokens": tokens[0]}


def dspark_round(model: Any, taps: torch.Tensor, embedding: torch.Tensor, head: Any, anchor: torch.Tensor) -> dict[str, Any]:
    run = resolve_runtime_config(draft_hf_config=model.config, speculative_num_draft_tokens=None, target_vocab_size=len(embedding))
    slots = run.gamma if model.sample_from_anchor else run.gamma + 1
    states = embedding[torch.cat([anchor, torch.full((slots - 1,), run.mask_token_id)])]
    hidden = block(model, taps, states)[-run.gamma :]
    model.attach_shared_modules(embed_tokens=torch.nn.Embedding.from_pretrained(embedding), lm_head=head)
    base, features = model.compute_base_logits(hidden)
    previous, state = anchor, model.markov_head.init_state(hidden[:1])
    logits, tokens = [], []
    for slot in range(run.gamma):  # `draft_markov_block` in torch; its module imports the scheduler
        bias, state = model.markov_head.step_bias(previous, hidden_states=hidden[slot : slot + 1], state=state)
        logits.append(base[slot] + bias[0])
        previous = logits[-1].argmax().view(1)
        tokens.append(previous)
    drafts = torch.cat(tokens)
    found = {"drafts": run.gamma, "hidden": hidden, "logits": torch.stack(logits), "tokens": drafts}
    if model.confidence_head is not None:
        raw = model.compute_confidence(anchor_tokens=anchor, draft_tokens=drafts[None], confidence_features=features)[1]
        found["confidence"] = raw[0]
    return found


def settings(job: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a server started with `--dtype auto` on a target of `context` positions makes of the folder's config."""
    config = get_config(job["folder"], trust_remote_code=False)
    dtype = _get_and_verify_dtype(config, "auto")
    asked = SimpleNamespace(is_draft_model=True, hf_text_config=config, hf_config=config)
    ModelConfig._derive_context_length(asked, job["context"])
    return {"dtype": str(dtype).removeprefix("torch."), "context": asked.context_len}


def gemma_embedding(job: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rows of a Gemma 4 target's embedding as a drafter gets them."""
    rows = given["embedding"]
    module = Gemma4TextScaledWordEmbedding(*rows.shape, 0, embed_scale=rows.shape[1] ** 0.5)
    module.weight.data[: len(rows)] = rows
    return {"rows": module(torch.arange(len(rows)))}
