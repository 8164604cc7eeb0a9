"""The four kinds of nano language models: their configurations, and fast stand-ins for slow parts of Hugging Face's code.

Legend: B rows, T tokens, H indexer heads, d indexer width, M blocks of r tokens.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specgraft.ops.gated_delta.chunked import gated_delta
from specgraft.ops.sparse_choice.vectorised import choose_rows

# kind -> folder of transformers.models, configuration class
CLASSES = {
    "full": ("qwen3", "Qwen3Config"),
    "gdn": ("qwen3_5", "Qwen3_5TextConfig"),
    "kda": ("kimi_linear", "KimiLinearConfig"),
    "qsa": ("qwen4_exp", "Qwen4ExpTextConfig"),
}
KINDS = tuple(CLASSES)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL_ROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def layer_types(layers: int, full: str = "full_attention") -> list[str]:
    """Three linear layers, then one that attends."""
    return [full if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]


def make_config(kind: str, vocabulary: int, hidden: int, layers: int, special: dict[str, int]) -> Any:
    """The configuration of `kind` for a vocabulary and a width; `special` holds pad and end (of a turn)."""
    heads = hidden // 32
    linear = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
              "linear_num_key_heads": heads // 2, "linear_num_value_heads": heads}  # fmt: skip
    settings: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "max_position_embeddings": 4096, "initializer_range": 0.02, "tie_word_embeddings": True, "bos_token_id": None,
        "pad_token_id": special["pad"], "eos_token_id": special["end"],
    }  # fmt: skip
    if kind == "full":
        settings |= {
            "intermediate_size": hidden * 4,
            "num_key_value_heads": heads // 2,
            "head_dim": 32,
            "rope_parameters": ROPE,
        }
    elif kind == "gdn":
        settings |= {"intermediate_size": hidden * 3, "num_key_value_heads": heads // 2, "head_dim": 32, **linear,
                     "rope_parameters": PARTIAL_ROPE, "layer_types": layer_types(layers)}  # fmt: skip
    elif kind == "kda":
        settings |= {"intermediate_size": hidden * 3, "moe_intermediate_size": hidden, "num_key_value_heads": heads,
                     "kv_lora_rank": hidden // 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
                     "linear_head_dim": 32, "linear_num_heads": heads, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
                     "layer_types": layer_types(layers), "mlp_layer_types": ["dense"] * layers}  # fmt: skip
    else:
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden * 2 // 96 * 32,
                     "shared_expert_intermediate_size": hidden * 2 // 96 * 32, "num_key_value_heads": heads // 2, "head_dim": 32, **linear,
                     "rope_parameters": PARTIAL_ROPE, "layer_types": layer_types(layers, "indexed_attention"),
                     "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_size": 3,
                     "ngram_vocab_size_base": 4001, "split_ngram_parts": 1, "indexer_n_heads": 4, "indexer_kv_heads": 1,
                     "indexer_head_dim": 32, "indexer_budget": 32, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid"}  # fmt: skip
    folder, name = CLASSES[kind]
    return getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), name)(**settings)


def make_model(config: Any, seed: int) -> Any:
    """A model with fresh weights. Gates of linear layers start with long memory, indexers look for what is alike."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(
                module, "in_proj_a"
            ):  # as flash-linear-attention; the default forgets in one token
                module.A_log.uniform_(1, 16).log_()
                step = torch.empty_like(module.dt_bias).uniform_(-6.9, -2.3).exp()
                module.dt_bias.copy_(step + (-torch.expm1(-step)).log())
            if hasattr(
                module, "index_qk_proj"
            ):  # the choice carries no gradient, so these stay: one head's queries like the keys
                width = module.index_head_dim
                module.index_qk_proj.weight[-width:] = module.index_qk_proj.weight[:width]
                module.requires_grad_(False)
    return model


def choose(
    indexer: Any, hidden: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """What the forward of a QSA indexer computes, for whole rows without a cache: bool [B, 1, T, T], the tokens each query reads.

    Every row starts at its first token and attends causally, so that `mask` says nothing new. Ties go to the lower block.
    """
    assert cache is None
    rows, length, _ = hidden.shape
    ratio, width = indexer.compress_ratio, indexer.index_head_dim
    rotate = importlib.import_module(type(indexer).__module__).apply_rotary_pos_emb
    cos, sin = positions
    with torch.no_grad():
        projected = indexer.index_qk_proj(hidden)
        queries, keys = projected[..., :-width].unflatten(-1, (-1, width)), projected[..., -width:]
        queries = rotate(indexer.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2)  # [B, T, H, d]
        blocks = length // ratio
        pooled = indexer.k_layernorm(
            keys[:, : blocks * ratio].unflatten(1, (blocks, ratio)).float().mean(2).to(keys.dtype)
        )
        starts = slice(0, blocks * ratio, ratio)
        pooled = rotate(pooled.unsqueeze(2), cos=cos[:, starts], sin=sin[:, starts], unsqueeze_dim=2).squeeze(
            2
        )  # [B, M, d]
        seen = torch.arange(1, length + 1, device=hidden.device).expand(rows, -1)
        return choose_rows(queries, pooled, seen, ratio, indexer.block_topk, length).unsqueeze(1)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Hugging Face's chunked delta rule (GDN and KDA) for whole rows. Measured, backward included: 1.2 and 3 times as fast."""
    assert (
        settings["use_qk_l2norm_in_kernel"]
        and settings.get("initial_state") is None
        and not settings["output_final_state"]
    )
    return gated_delta(q, k, v, g, beta, chunk=16)[0], None


@contextmanager
def fast(model: Any) -> Iterator[None]:
    """While open, rows that start at their first token run the same arithmetic in less time; tests compare the two."""
    module = importlib.import_module(type(model).__module__)
    kept: list[tuple[Any, str, Any]] = []
    for indexer in (part for part in model.modules() if hasattr(part, "index_qk_proj")):
        kept.append((indexer, "forward", None))
        indexer.forward = functools.partial(choose, indexer)
    for name in ("chunk_kimi_delta_attention", "torch_chunk_gated_delta_rule"):
        if (slow := getattr(module, name, None)) is not None:
            kept.append((module, name, slow))
            setattr(module, name, delta_rule)
    try:
        yield
    finally:
        for owner, name, old in kept:
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


@torch.no_grad()
def sharpen(model: Any, factor: float) -> None:
    """Multiplies the head by `factor`; it no longer shares the embedding's weights then. A model trained for minutes is
    unsure of every token, and what it draws at temperature 1 is noise that no drafter could foresee."""
    if factor == 1.0:
        return
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * factor)
    model.config.tie_word_embeddings = False
