"""What cannot be exported, said before anything is written: one line with what, where, and what to do."""

from __future__ import annotations

from specgraft.drafters.config import FULL, DrafterConfig
from specgraft.export.facts import TargetFacts


def refuse(config: DrafterConfig, dtype: str, to: str, facts: TargetFacts) -> None:
    """Raises ValueError for the first thing in which this drafter, as `to`, breaks the contract."""
    if reason := no_exporter(config):
        raise ValueError(reason)
    _refuse_taps(config, to)
    _refuse_vocabulary(config, facts)
    if config.heads % config.kv_heads:
        raise ValueError(
            f"drafters.heads={config.heads} is no multiple of drafters.kv_heads={config.kv_heads}; train with one that is"
        )
    if config.head_dim % 2:
        raise ValueError(f"drafters.head_dim={config.head_dim} is odd and cannot be rotated; train with an even one")
    context = facts.max_positions
    if config.max_positions < 1 or (context is not None and config.max_positions < context):
        raise ValueError(
            f"drafter max_positions={config.max_positions}: the target's context is {context or 'longer'} and the engine "
            "refuses a shorter draft; train a drafter for this target"
        )
    if to == "sglang" and dtype == "float32":
        raise ValueError(
            'export.dtype="float32": SGLang would cast it to float16; use export.dtype="bfloat16", or export.to="hf"'
        )


def no_exporter(config: DrafterConfig) -> str:
    """Why no exporter knows this shape of drafter, or nothing: such a drafter is trained and measured, and kept as it is."""
    if config.kind != "dspark":
        return f"drafters.kind={config.kind!r}: only dspark is exported so far; train that, or keep the checkpoint"
    if not config.confidence:
        return "drafters.confidence=false: the exported layout has the head; train with drafters.confidence=true"
    if config.block_causal or set(config.layer_types) != {FULL}:
        return "drafters.block_causal and sliding layers are not exported so far; train with full attention, not causal"
    if config.markov_head != "vanilla":
        return f"drafters.markov_head={config.markov_head!r}: only vanilla is exported; train with that"
    if config.markov_rank < 1:
        return f"drafters.markov_rank={config.markov_rank}: the engine needs at least 1; train with drafters.markov_rank=1 or more"
    return ""


def _refuse_taps(config: DrafterConfig, to: str) -> None:
    taps, layers = list(config.taps), config.target_layers
    if not taps:
        raise ValueError("drafter taps: the list is empty; train with at least one layer in capture.taps")
    if taps != sorted(set(taps)):
        raise ValueError(
            f"drafter taps {taps}: must be sorted and unique; train again with capture.taps in rising order"
        )
    if taps[0] < 0 or taps[-1] >= layers:
        raise ValueError(
            f"drafter taps {taps}: the target's decoder layers are 0 to {layers - 1}; train again with those"
        )
    if to == "sglang" and taps[-1] > layers - 2:
        raise ValueError(
            f"drafter tap {taps[-1]} is the target's last layer, which SGLang cannot capture (at most {layers - 2}): "
            'train again with other capture.taps, or use export.to="hf"'
        )


def _refuse_vocabulary(config: DrafterConfig, facts: TargetFacts) -> None:
    for what, own, target in (
        ("vocabulary", config.vocab_size, facts.vocab_size),
        ("hidden size", config.hidden_size, facts.hidden_size),
        ("number of target layers", config.target_layers, facts.layers),
    ):
        if target is not None and own != target:
            raise ValueError(
                f"drafter {what} {own}: the target's is {target} and must be the same; train a drafter for this target"
            )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(
            f"drafter mask_token_id={config.mask_token_id}: the vocabulary has {config.vocab_size} ids; "
            "set target.mask_token_id to one of them and train again"
        )
