"""What all published drafters share: a Qwen3-shaped trunk described by a Hugging Face Qwen3 config."""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import FULL, SLIDING, DrafterConfig
from specgraft.drafters.layouts.files import Fields

SAME_MODEL = {  # at any other value the layers are not ours
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "use_gemma_norm": (False,),
    "rope_is_neox_style": (True,),
    "quantization_config": (),
}


def trunk_fields(fields: Fields) -> dict[str, Any]:
    """Fields of a `DrafterConfig` that a Qwen3 config states. Raises ValueError naming what is missing or not supported."""
    for name in ("hidden_act", "attention_bias"):
        fields.value(name)
    for name, allowed in SAME_MODEL.items():
        fields.only(name, *allowed)
    types = fields.items("layer_types", str)
    if odd := set(types) - {FULL, SLIDING}:
        raise fields.fault("layer_types", f" names {min(odd)!r}; known are {FULL} and {SLIDING}")
    if len(types) != fields.integer("num_hidden_layers"):
        raise fields.fault("layer_types", f" has {len(types)} entries for num_hidden_layers={fields.integer('num_hidden_layers')}")
    if SLIDING in types and not fields.flag("use_sliding_window"):
        raise fields.fault("use_sliding_window", "=false, and layer_types names sliding layers: readers disagree on what that means")
    return {
        "layers": len(types),
        "hidden_size": fields.integer("hidden_size"),
        "vocab_size": fields.integer("vocab_size"),
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.integer("head_dim"),
        "intermediate": fields.integer("intermediate_size"),
        "eps": fields.real("rms_norm_eps"),
        "rope_theta": rope_theta(fields),
        "max_positions": fields.integer("max_position_embeddings"),
        "layer_types": types,
        "sliding_window": fields.integer("sliding_window") if SLIDING in types else 0,
    }


def rope_theta(fields: Fields) -> float:
    """Base of plain rotary positions, nested as newer files have it or flat as older ones."""
    found = []
    if "rope_parameters" in fields:
        part = fields.part("rope_parameters")
        part.only("rope_type", "default")
        part.only("partial_rotary_factor", 1, 1.0)
        if odd := set(part.data) - {"rope_type", "rope_theta", "partial_rotary_factor"}:
            raise part.fault(min(odd), " is not supported: rotary positions must be plain")
        part.value("rope_type")
        found.append(part.real("rope_theta"))
    fields.only("rope_scaling", {"rope_type": "default"}, {"type": "default"})
    if "rope_theta" in fields or not found:
        found.append(fields.real("rope_theta"))
    if len(set(found)) > 1:
        raise fields.fault("rope_theta", f"={found[1]} and rope_parameters.rope_theta={found[0]} disagree")
    return found[0]


def block_causal(types: tuple[str, ...], full: bool, sliding: bool, fields: Fields) -> bool:
    """Whether slots see the slots before them only, given what the layout says of full and of sliding layers."""
    asked = {full if kind == FULL else sliding for kind in types}
    if len(asked) > 1:
        raise fields.fault("layer_types", " mixes full layers that see a whole block with causal sliding ones, which is not supported")
    return asked.pop()


def tap_ids(fields: Fields, name: str, first: int, layers: int) -> tuple[int, ...]:
    """0-based target layers from ids that count the first layer as `first`; `layers` of the target, 0 where nobody says."""
    taps = tuple(i - first for i in fields.items(name, int))
    if not taps or len(set(taps)) < len(taps):
        raise fields.fault(name, f"={fields.value(name)!r} must name layers, each once")
    if min(taps) < 0 or (layers and max(taps) >= layers):
        limit = f"{first} to {layers - 1 + first}" if layers else f"{first} and above"
        raise fields.fault(name, f"={fields.value(name)!r}: the target's layers are {limit}; its embedding is no tap here")
    return taps


def trunk_json(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The Qwen3 config of this trunk; nothing is left to a reader's default."""
    sliding = SLIDING in c.layer_types
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate,
        "layer_types": list(c.layer_types),
        "max_position_embeddings": c.max_positions,
        "max_window_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "rms_norm_eps": c.eps,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "rope_theta": c.rope_theta,  # for readers older than rope_parameters
        "sliding_window": c.sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": c.vocab_size,
    }


def shared_tensors(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the target that a file may hold as well, and their shapes."""
    return {"embed_tokens.weight": (c.vocab_size, c.hidden_size), "lm_head.weight": (c.vocab_size, c.hidden_size)}
