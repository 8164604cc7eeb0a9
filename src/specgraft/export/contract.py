"""What SGLang 0.5.23 and vLLM 0.32 load as a draft: tensor names, shapes and config keys, as data. One form for both.

The engines report no missing tensor (they would serve uninitialised weights), so these tables are held exactly on both ways.
DSpark is DeepSpec's layout, `block_size` counting drafts; DFlash and DFlash2 are z-lab's, `block_size` counting the anchor too.
Layer id i is the output of decoder layer i, 0-based, before any norm. Legend: D hidden size, V vocabulary, v draft vocabulary
(V unless pruned), r Markov or selector rank.
"""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import SLIDING, DrafterConfig
from specgraft.drafters.convolution import TAPS
from specgraft.drafters.layouts import zlab

ARCHITECTURE = "Qwen3DSparkModel"
WEIGHTS = "model.safetensors"
Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: DrafterConfig, vocabulary: int = 0) -> Shapes:
    """Every tensor of the file and its shape; no embedding, and a head only with a `vocabulary` of its own (v tokens)."""
    c = config
    hidden = c.hidden_size
    found: Shapes = {
        "fc.weight": (hidden, len(c.taps) * hidden),  # columns in the order of target_layer_ids
        "hidden_norm.weight": (hidden,),  # behind fc
        "norm.weight": (hidden,),
    }
    for index in range(c.layers):
        found |= _layer(c, f"layers.{index}")
    if c.kind == "dspark":
        found |= _dspark_heads(c, vocabulary or c.vocab_size)
    if c.kind == "dflash2":
        found |= {
            "candidate_selector.predecessor_codebook": (c.vocab_size, c.selector_rank),
            "candidate_selector.successor_codebook": (c.vocab_size, c.selector_rank),
            "candidate_selector.hidden_projection.weight": (c.selector_rank, hidden),
        }
    if vocabulary:
        found |= {"lm_head.weight": (vocabulary, hidden), "d2t": (vocabulary,), "t2d": (c.vocab_size,)}
    return found


def _layer(c: DrafterConfig, layer: str) -> Shapes:
    hidden, query, key = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    found: Shapes = {
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
    if c.kind == "dflash2":
        groups = hidden // c.conv_group
        for name in ("attention_conv", "mlp_conv"):
            found |= {
                f"{layer}.{name}.base_kernel": (2, TAPS, hidden),  # before and behind the sublayer
                f"{layer}.{name}.kernel_projection.weight": (2 * TAPS * groups, hidden),
            }
    return found


def _dspark_heads(c: DrafterConfig, vocabulary: int) -> Shapes:
    hidden, rank, found = c.hidden_size, c.markov_rank, Shapes()
    if rank:
        found |= {"markov_head.markov_w1.weight": (c.vocab_size, rank), "markov_head.markov_w2.weight": (vocabulary, rank)}
    if rank and c.markov_head == "gated":
        found |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and c.markov_head == "rnn":
        found |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
    if c.confidence:
        found["confidence_head.proj.weight"] = (1, hidden + (rank if c.confidence_with_markov else 0))
        found["confidence_head.proj.bias"] = (1,)
    return found


def config_json(config: DrafterConfig, dtype: str, vocabulary: int = 0) -> dict[str, Any]:
    """config.json of the export. Nothing is left to a default of an engine or of transformers."""
    c = config
    pruned = {"draft_vocab_size": vocabulary} if vocabulary else {}
    if c.kind != "dspark":
        return zlab.config_json(c, dtype) | pruned
    sliding = SLIDING in c.layer_types
    found = {
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
        "dtype": dtype,  # absent or float32, SGLang would cast to float16
        "tie_word_embeddings": False,
        "layer_types": list(c.layer_types),
        "use_sliding_window": sliding,  # without the flag a Qwen3 config drops the window
        "sliding_window": c.sliding_window if sliding else None,
        "is_causal": c.block_causal,  # unsaid, sliding layers of a block would be causal
        "block_size": c.draft_tokens,  # DSPARK counts drafts here, DFLASH would count inputs
        "target_layer_ids": list(c.taps),
        "num_target_layers": c.target_layers,
        "mask_token_id": c.mask_token_id,
        "markov_rank": c.markov_rank,  # top level: nested only, the model is not built
        "markov_head_type": c.markov_head,
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
        "sample_from_anchor": True,  # G inputs, slot j proposes the token behind it
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.taps),
        },
    }
    return found | pruned
