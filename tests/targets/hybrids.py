"""Tiny random targets of every kind of layer, and what unpatched transformers says about them.

`tiny(kind, dtype)` gives the untouched Hugging Face model and a `Target` with the same weights. transformers computes norms,
softmax and recurrences in float32 whatever the model's dtype, so the float64 models are made of a copy of its modeling file in
which every float32 is a float64. Legend: S stem tokens, N branches, W tokens a branch, V vocabulary.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from specgraft.records import ProposalTree
from specgraft.targets.attention import NAME
from specgraft.targets.model import Target

VOCAB, END = 64, 1
HELD = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"  # renamed in 5.2x
LINEAR, FULL, INDEXED, SLIDING = "linear_attention", "full_attention", "indexed_attention", "sliding_attention"

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15, "eos_token_id": END, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {"intermediate_size": 96}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MIXED = [LINEAR, FULL, LINEAR, LINEAR, FULL]

# kind -> folder of transformers, prefix of its classes, config
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", SHAPE | DENSE | {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", SHAPE | DENSE | {"num_hidden_layers": 3, "head_dim": 16}),
    "solar_open": (
        "solar_open", "SolarOpenConfig", "SolarOpenForCausalLM",
        SHAPE | DENSE | {
            "num_hidden_layers": 3, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss", "GptOssConfig", "GptOssForCausalLM",
        SHAPE | {
            "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mistral": (
        "mistral", "MistralConfig", "MistralForCausalLM",
        SHAPE | DENSE | {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 6},
    ),
    "qwen3_next": (
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM",
        SHAPE | EXPERTS | DELTA | {
            "num_hidden_layers": 5, "layer_types": MIXED, "head_dim": 32, "rope_parameters": ROPE, "intermediate_size": 96
        },
    ),
    "qwen3_5": (
        "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
        SHAPE | DENSE | DELTA | {"num_hidden_layers": 5, "layer_types": MIXED, "head_dim": 32, "rope_parameters": MROPE},
    ),
    "kimi_linear": (
        "kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM",
        SHAPE | DENSE | {
            "num_hidden_layers": 5, "layer_types": MIXED, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 24, "qk_nope_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
            "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
    ),
    "qwen4_exp": (
        "qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM",
        SHAPE | EXPERTS | DELTA | {
            "num_hidden_layers": 5, "layer_types": [LINEAR, LINEAR, INDEXED, LINEAR, INDEXED], "head_dim": 32, "rope_parameters": MROPE,
            "hc_count": 3, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_size": 3,
            "ngram_vocab_size_base": 101, "split_ngram_parts": 1, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 16, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
        },  # 16 indexer heads: with few, relu gives groups the score 0 exactly and transformers breaks ties as it likes
    ),
}  # fmt: skip
HYBRIDS = ["qwen3_next", "qwen3_5", "kimi_linear", "qwen4_exp"]


@dataclass(frozen=True)
class Tiny:
    """One model twice. Filled by `tiny`."""

    plain: Any  # transformers' own, eager attention
    target: Target

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """As `Target.logits`, in the model's own dtype."""
        return self.target.head(self.target.final_norm(last))

    @torch.inference_mode()
    def alone(self, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        """Logits [T,V] of a text that transformers runs by itself."""
        return self.plain(input_ids=ids[None], use_cache=False, **more).logits[0]

    @torch.inference_mode()
    def continued(self, ids: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens `more` that transformers runs behind a cache of `ids`: its own rounding error."""
        held = DynamicCache(config=self.plain.config)
        self.plain(input_ids=ids[None], use_cache=True, **{HELD: held})
        return self.plain(input_ids=more[None], use_cache=True, **{HELD: held}).logits[0]

    @torch.inference_mode()
    def layers(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """[T,E] output of each decoder layer of transformers' own run."""
        kept: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda m, a, out: kept.append((out[0] if isinstance(out, tuple) else out)[0]))
            for layer in self.plain.model.layers
        ]
        try:
            self.plain(input_ids=ids[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return kept


def classes(kind: str, wide: bool) -> tuple[Any, Any]:
    """Config class and model class; with `wide` the model's is of the float64 copy. Skips where transformers lacks the kind."""
    folder, config, model, _ = KINDS[kind]
    parent = f"transformers.models.{folder}"
    try:
        made = getattr(importlib.import_module(f"{parent}.configuration_{folder}"), config)
        source = importlib.import_module(f"{parent}.modeling_{folder}")
    except ImportError:
        pytest.skip(f"this transformers has no {folder}")
    if not wide:
        return made, getattr(source, model)
    name = f"{source.__name__}_wide"
    if name not in sys.modules:
        text = Path(str(source.__file__)).read_text()
        for narrow, broad in (
            ("torch.float32", "torch.float64"), (".float()", ".double()"), ("dtype=torch.float)", "dtype=torch.float64)")
        ):  # fmt: skip
            text = text.replace(narrow, broad)
        copied = types.ModuleType(name)
        copied.__package__, copied.__file__ = parent, source.__file__
        sys.modules[name] = copied
        exec(compile(text, f"{source.__file__}:wide", "exec"), copied.__dict__)
    return made, getattr(sys.modules[name], model)


def build(kind: str, dtype: torch.dtype, seed: int = 0, **more: Any) -> Any:
    """A random model in which nothing is left at a value that hides it: norms, sinks, biases and convolutions are all random."""
    config_class, model_class = classes(kind, dtype == torch.float64)
    config = config_class(**(KINDS[kind][3] | more))
    config._attn_implementation, config._experts_implementation = "eager", "eager"  # grouped products have no float64
    torch.manual_seed(seed)
    model = model_class(config)
    model.generation_config.eos_token_id = END
    if dtype == torch.float64:  # the same weights
        model.load_state_dict(build(kind, torch.float32, seed, **more).state_dict())
        return model.double().eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in ("ple.conv1d", "sinks", "correction_bias")):  # zero, or whatever was in memory
                value.copy_(torch.randn_like(value) * 0.3)
            elif "A_log" in name:  # as transformers makes it, a state forgets all within a few dozen tokens
                value.copy_(torch.empty_like(value).uniform_(0.01, 0.3).log())
            elif "norm" in name or "bias" in name:
                value.add_(torch.randn_like(value) * 0.1)
    return model.to(dtype).eval()


def as_target(model: Any) -> Target:
    model.config._attn_implementation = NAME
    return Target(model, types.SimpleNamespace(eos_token_id=END, chat_template="stub"), Path("tiny"), torch.device("cpu"))


@cache
def tiny(kind: str, dtype: torch.dtype = torch.float64) -> Tiny:
    plain = build(kind, dtype)
    return Tiny(plain, as_target(copy.deepcopy(plain)))


def text(length: int, seed: int = 0) -> torch.Tensor:
    """Random ids with an end token here and there."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=source)
    return torch.where(torch.rand(length, generator=source) < 0.08, END, ids)


# 63 and 64 lie on both sides of a kept state, 66 to 68 around the border of a QSA group
TREES: dict[str, tuple[int, list[int], int]] = {
    "borders": (130, [0, 129, 62, 63, 64, 63, 127, 128, 66, 67, 68], 7),
    "wide": (70, [0, 33, 69], 70),
    "one token": (66, [65, 0, 5, 63, 64], 1),
    "stem of 1": (1, [0, 0], 6),
    "stem of 2": (2, [0, 1], 6),
    "stem of 3": (3, [2, 0, 1], 6),
}


def make_tree(name: str, seed: int = 0) -> tuple[torch.Tensor, ProposalTree]:
    length, anchors, width = TREES[name]
    ids = text(length, seed)
    ids[-2:-1] = END  # an end token that the n-grams of a branch reach back to
    branches = text(len(anchors) * width, seed + 1).view(-1, width)
    if width > 3:
        branches[-1, 1] = END
    return ids, ProposalTree(length, torch.tensor(anchors), branches)


@cache
def oracle(kind: str, dtype: torch.dtype, name: str) -> torch.Tensor:
    """[N,W,V]: transformers on [stem up to the anchor + branch] alone, branch by branch."""
    model, (ids, tree) = tiny(kind, dtype), make_tree(name)
    return alone(model, ids, tree)


def alone(model: Tiny, ids: torch.Tensor, tree: ProposalTree) -> torch.Tensor:
    width = tree.branches.shape[1]
    rows = [
        model.alone(torch.cat([ids[: anchor + 1], branch]))[-width:]
        for anchor, branch in zip(tree.anchors.tolist(), tree.branches, strict=True)
    ]
    return torch.stack(rows)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())
