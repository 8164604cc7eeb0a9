"""Builds the drafter of a run: its shape from config and target, its starting values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from specgraft.config import DraftersSection, RunConfig
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.layouts.registry import read
from specgraft.drafters.registry import build
from specgraft.drafters.store import WEIGHTS, load_drafter
from specgraft.drafters.warm import copy_layers, fits, no_pairs_for, start_fc, start_from, start_markov
from specgraft.log import say
from specgraft.records import Conversation
from specgraft.run_dir import RunDir
from specgraft.targets.model import Target
from specgraft.train.checkpoint import STATE, checkpoints, latest, verify

MASK_TOKENS = {"smollm2": 16}  # <empty_output>: reserved in the vocabulary, never written by the target


def mask_token(config: RunConfig, target: Target) -> int:
    """The reserved id of the open slots. Raises ValueError when none is named or it is in use otherwise."""
    chosen = config.target.mask_token_id
    if chosen is None:
        chosen = MASK_TOKENS.get(config.target.id)
    if chosen is None:
        raise ValueError("target.mask_token_id is not set: name an id of the vocabulary that the target never writes")
    if chosen >= target.vocab_size:
        raise ValueError(f"target.mask_token_id={chosen}: the target's vocabulary has {target.vocab_size} rows")
    if chosen in target.end_ids or chosen == target.tokenizer.pad_token_id:
        raise ValueError(f"target.mask_token_id={chosen} is an end or padding token: name an unused id")
    return chosen


def drafter_config(config: RunConfig, target: Target, taps: list[int]) -> DrafterConfig:
    """The drafter's shape; what is 0 in the run file is as in the target."""
    part, shape = config.drafters, target.config
    heads = part.heads or shape.num_attention_heads
    kv_heads = part.kv_heads or shape.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"drafters.heads={heads} is no multiple of drafters.kv_heads={kv_heads}")
    types = part.layer_types if isinstance(part.layer_types, list) else [f"{part.layer_types}_attention"] * part.layers
    rope = getattr(shape, "rope_parameters", None) or {}
    return DrafterConfig(
        kind=part.kind,
        draft_tokens=part.draft_tokens,
        layers=part.layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=part.head_dim or getattr(shape, "head_dim", None) or target.hidden_size // shape.num_attention_heads,
        intermediate=part.intermediate or getattr(shape, "intermediate_size", None) or 3 * target.hidden_size,  # experts: no width of one MLP
        eps=shape.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", getattr(shape, "rope_theta", 10000.0))),
        max_positions=shape.max_position_embeddings,
        taps=tuple(taps),
        target_layers=target.num_layers,
        mask_token_id=mask_token(config, target),
        layer_types=tuple(types),
        sliding_window=part.sliding_window if "sliding_attention" in types else 0,
        block_causal=part.block_causal,
        options=part.options,
        **kind_fields(part),
    )


def kind_fields(part: DraftersSection) -> dict[str, Any]:
    """The fields that one kind has and the others leave at nothing."""
    if part.kind == "dspark":
        names = ["markov_rank", "markov_head", "confidence", "confidence_with_markov", "confidence_detach"]
    elif part.kind == "dflash2":
        names = ["conv_group", "selector_rank", "selector_top_k"]
    else:
        names = []
    return {name: getattr(part, name) for name in names}


def spread_layers(layers: int, count: int) -> list[int]:
    """`count` target layers for a warm start: the first ones hold the embedding's work, the last ones the head's."""
    if count > layers:
        raise ValueError(f"drafters.layers={count}: the target has only {layers} layers to start from")
    return sorted({round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)})


def warm_source(folder: Path) -> Drafter:
    """A drafter from a checkpoint of ours, the newest one of a run, or a published layout. Raises ValueError for another folder."""
    try:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        for root in (RunDir(folder).checkpoints, folder):
            if checkpoints(root):
                return load_drafter(latest(root))
        if (folder / WEIGHTS).is_file():
            return load_drafter(verify(folder) if (folder / STATE).is_file() else folder)
        return read(folder)
    except ValueError as error:
        raise ValueError(f"drafters.warm_from: {error}") from None


def new_drafter(
    config: RunConfig, target: Target, taps: list[int], conversations: Iterable[Conversation] = (), start: bool = True
) -> Drafter:
    """A drafter with the starting values that the run file asks for; the same seed gives the same values.

    Without `start` the values are random: those of a checkpoint come in their place, and what they began as is not needed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        drafter = build(drafter_config(config, target, taps))
    part = config.drafters
    if not start:
        return drafter.to(target.device)
    if part.warm_from:
        source = warm_source(Path(part.warm_from))
        if part.warm_markov and source.markov_head is not None and fits("markov_head.", drafter.config, source.config):
            raise ValueError("drafters.warm_from brings a Markov head: set drafters.warm_markov=false")
        say(f"train: started from {start_from(drafter, source, part.warm_from)}")
    if part.warm_layers != "none":
        ids = spread_layers(target.num_layers, part.layers) if part.warm_layers == "spread" else list(part.warm_layers)
        if bad := [i for i in ids if not 0 <= i < target.num_layers]:
            raise ValueError(f"drafters.warm_layers: the target has layers 0 to {target.num_layers - 1}, not {bad[0]}")
        copy_layers(drafter, [target.layers[i] for i in ids], target.final_norm)
    if part.warm_fc != "none":
        start_fc(drafter, part.warm_fc)
    if part.warm_markov and (reason := no_pairs_for(drafter)):
        say(f"train: drafters.warm_markov starts nothing: {reason}")
    elif part.warm_markov:
        before, after = token_pairs(conversations)
        start_markov(drafter, before, after)
    return drafter.to(target.device)


def token_pairs(conversations: Iterable[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbouring tokens of the train answers, [P] and [P]: the second of a pair was written by the target."""
    before: list[int] = []
    after: list[int] = []
    for conversation in conversations:
        if conversation.split == "train":
            for span in conversation.spans:
                ids = conversation.input_ids[span.start - 1 : span.stop]
                before += ids[:-1]
                after += ids[1:]
    if not before:
        raise ValueError("drafters.warm_markov needs answers to count token pairs in; run regen first")
    return torch.tensor(before), torch.tensor(after)
