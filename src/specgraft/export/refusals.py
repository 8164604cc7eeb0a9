"""What cannot be exported, said before anything is written: one line with what, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable

from specgraft.drafters.config import SLIDING, DrafterConfig
from specgraft.export.facts import TargetFacts
from specgraft.export.support import unsupported

KINDS = ("dspark", "dflash", "dflash2")


def refuse(config: DrafterConfig, dtype: str, to: str, facts: TargetFacts, vocabulary: int = 0) -> None:
    """Raises ValueError for the first thing in which this drafter, as `to`, breaks the contract."""
    if reason := no_exporter(config):
        raise ValueError(reason)
    for rule in (_shape, _target, _engine, _vocabulary):
        if reason := rule(config, dtype, to, facts, vocabulary):
            raise ValueError(reason)


def no_exporter(config: DrafterConfig) -> str:
    """Why no engine loads this shape of drafter, or nothing: such a drafter is trained and measured, and kept as it is."""
    if config.kind not in KINDS:
        return f"drafters.kind={config.kind!r}: engines load {', '.join(KINDS)} beside a target; train one of these, or keep the checkpoint"
    return ""


def _shape(c: DrafterConfig, dtype: str, to: str, facts: TargetFacts, vocabulary: int) -> str:
    taps, layers = list(c.taps), c.target_layers
    if not taps:
        return "drafter taps: the list is empty; train with at least one layer in capture.taps"
    if taps != sorted(set(taps)):
        return f"drafter taps {taps}: must be sorted and unique; train again with capture.taps in rising order"
    if taps[0] < 0 or taps[-1] >= layers:
        return f"drafter taps {taps}: the target's decoder layers are 0 to {layers - 1}; train again with those"
    if c.heads % c.kv_heads:
        return f"drafters.heads={c.heads} is no multiple of drafters.kv_heads={c.kv_heads}; train with one that is"
    if c.head_dim % 2:
        return f"drafters.head_dim={c.head_dim} is odd and cannot be rotated; train with an even one"
    if not 0 <= c.mask_token_id < c.vocab_size:
        return (
            f"drafter mask_token_id={c.mask_token_id}: the vocabulary has {c.vocab_size} ids; "
            "set target.mask_token_id to one of them and train again"
        )
    return ""


def _target(c: DrafterConfig, dtype: str, to: str, facts: TargetFacts, vocabulary: int) -> str:
    for what, own, target in (
        ("vocabulary", c.vocab_size, facts.vocab_size),
        ("hidden size", c.hidden_size, facts.hidden_size),
        ("number of target layers", c.target_layers, facts.layers),
    ):
        if target is not None and own != target:
            return f"drafter {what} {own}: the target's is {target} and must be the same; train a drafter for this target"
    context = facts.max_positions
    if c.max_positions < 1 or (context is not None and c.max_positions < context):
        return (
            f"drafter max_positions={c.max_positions}: the target's context is {context or 'longer'} and engines "
            "refuse a shorter draft; train a drafter for this target"
        )
    return unsupported(to, c.kind, facts.model_type)


def _engine(c: DrafterConfig, dtype: str, to: str, facts: TargetFacts, vocabulary: int) -> str:
    return ENGINES[to](c, dtype)


def _sglang(c: DrafterConfig, dtype: str) -> str:
    if c.taps[-1] > c.target_layers - 2:
        return _last_layer(c, "SGLang")
    if dtype == "float32":
        return 'export.dtype="float32": SGLang would cast it to float16; use export.dtype="bfloat16", or export.to="hf"'
    if c.kind == "dspark" and c.markov_rank < 1:
        return f"drafters.markov_rank={c.markov_rank}: SGLang needs at least 1; train with drafters.markov_rank=1 or more"
    return ""


def _vllm(c: DrafterConfig, dtype: str) -> str:
    if c.block_causal or SLIDING in c.layer_types:
        return (
            "drafters.block_causal and sliding layers: vLLM reads other keys for them, which were never tried; train with full "
            'attention, not causal, or use export.to="sglang"'
        )
    if c.kind == "dspark" and c.markov_rank and c.markov_head != "vanilla":
        return f"drafters.markov_head={c.markov_head!r}: vLLM loads only vanilla; train with that, or use export.to=\"sglang\""
    return ""


def _llamacpp(c: DrafterConfig, dtype: str) -> str:
    if c.taps[-1] > c.target_layers - 2:
        return _last_layer(c, "llama.cpp")
    if SLIDING in c.layer_types:
        return (
            "sliding layers: llama.cpp's window was never compared with ours; train with drafters.layer_types=\"full\", "
            'or use export.to="sglang"'
        )
    if c.kind == "dspark" and c.markov_rank < 1:
        return "drafters.markov_rank=0: llama.cpp would take the file for a DFlash one; train with drafters.markov_rank=1 or more"
    if c.kind == "dspark" and c.markov_head != "vanilla":
        return f"drafters.markov_head={c.markov_head!r}: llama.cpp loads only vanilla; train with that, or use export.to=\"sglang\""
    if c.kind == "dspark" and c.confidence and not c.confidence_with_markov:
        return "drafters.confidence_with_markov=false: llama.cpp's head reads the Markov state too; train with it, or with drafters.confidence=false"
    if c.kind == "dflash2" and c.hidden_size < c.selector_top_k * (c.selector_top_k + 1):
        return f"drafters.selector_top_k={c.selector_top_k}: too many for hidden size {c.hidden_size} in llama.cpp; train with fewer"
    return ""


def _last_layer(c: DrafterConfig, engine: str) -> str:
    return (
        f"drafter tap {c.taps[-1]} is the target's last layer, which {engine} cannot capture (at most {c.target_layers - 2}): "
        'train again with other capture.taps, or use export.to="hf"'
    )


ENGINES: dict[str, Callable[[DrafterConfig, str], str]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "hf": lambda c, dtype: "",
}


def _vocabulary(c: DrafterConfig, dtype: str, to: str, facts: TargetFacts, vocabulary: int) -> str:
    if not vocabulary:
        return ""
    if to == "sglang":
        return f'export.vocabulary={vocabulary}: SGLang knows no reduced draft vocabulary; set it to 0, or use export.to="vllm" or "llamacpp"'
    if vocabulary >= c.vocab_size:
        return f"export.vocabulary={vocabulary}: the target has {c.vocab_size} ids; give fewer, or 0 for all"
    if c.kind == "dflash2":
        return f"export.vocabulary={vocabulary}: dflash2's selector needs every id; set it to 0"
    return ""
