"""What SGLang 0.5.23 loads as a DSPARK draft: tensor names, shapes and config keys, as data.

The engine reports no missing tensor (it would serve uninitialised weights), so this table is held exactly on both ways.
Layer id i is the output of decoder layer i, 0-based, before any norm. Legend: D hidden size, V vocabulary, r Markov rank.
"""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import DrafterConfig

ARCHITECTURE = "Qwen3DSparkModel"
WEIGHTS = "model.safetensors"


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file and its shape; no embedding and no head, which are the target's."""
    c = config
    hidden, query, key = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(c.taps) * hidden),  # columns in the order of target_layer_ids
        "hidden_norm.weight": (hidden,),  # behind fc
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (c.vocab_size, c.markov_rank),
        "markov_head.markov_w2.weight": (c.vocab_size, c.markov_rank),
        "confidence_head.proj.weight": (1, hidden + (c.markov_rank if c.confidence_with_markov else 0)),
        "confidence_head.proj.bias": (1,),
    }
    for index in range(c.layers):
        layer = f"layers.{index}"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query, hidden),
            f"{layer}.self_attn.k_proj.weight": (key, hidden),
            f"{layer}.self_attn.v_proj.weight": (key, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query),
            f"{layer}.self_attn.q_norm.weight": (c.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (c.head_dim,),
            f"{layer}.mlp.gate_proj.weight": (c.intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (c.intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, c.intermediate),
        }
    return found


def config_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of the export. Nothing is left to a default of the engine or of transformers."""
    c = config
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",  # one that AutoConfig knows
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,  # never derived from hidden_size
        "intermediate_size": c.intermediate,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},  # the drafter's own, not the target's
        "rope_theta": c.rope_theta,  # for readers older than rope_parameters
        "max_position_embeddings": c.max_positions,
        "dtype": dtype,  # absent or float32, the engine would cast to float16
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * c.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,  # slots of a block see each other both ways
        "block_size": c.draft_tokens,  # DSPARK counts drafts here, DFLASH would count inputs
        "target_layer_ids": list(c.taps),
        "num_target_layers": c.target_layers,
        "mask_token_id": c.mask_token_id,
        "markov_rank": c.markov_rank,  # top level: nested only, the model is not built
        "markov_head_type": c.markov_head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": c.confidence_with_markov,
        "sample_from_anchor": True,  # G inputs, slot j proposes the token behind it
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.taps),
        },
    }
