"""A target with its drafter, checked to belong together."""

from __future__ import annotations

from dataclasses import dataclass

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.markov import BiasRows
from specgraft.drafters.shared import Shared
from specgraft.targets.model import Target


@dataclass(frozen=True)
class Pair:
    """What the decode loop runs. Filled by `pair`."""

    target: Target
    drafter: Drafter
    shared: Shared
    bias: BiasRows | None  # remembered between calls of `decode`


def pair(target: Target, drafter: Drafter) -> Pair:
    """Joins the two. Raises ValueError, in one line, where the drafter was made for another target."""
    check_pair(target, drafter.config)
    bias = BiasRows(drafter.markov_head) if drafter.markov_head is not None else None
    return Pair(target, drafter, Shared.of(target, drafter.config.mask_token_id), bias)


def check_pair(target: Target, config: DrafterConfig) -> None:
    """Raises ValueError naming the first thing in which target and drafter differ."""
    advice = "use the target it was trained on, or train a drafter for this one"
    for what, own, other in (
        ("vocabulary", target.vocab_size, config.vocab_size),
        ("hidden size", target.hidden_size, config.hidden_size),
    ):
        if own != other:
            raise ValueError(f"the target's {what} is {own} and the drafter's {other}: {advice}")
    for tap in config.taps:
        if not 0 <= tap < target.num_layers:
            raise ValueError(
                f"drafter tap {tap}: the target's decoder layers are 0 to {target.num_layers - 1}: {advice}"
            )
    if target.num_layers != config.target_layers:
        raise ValueError(
            f"the target has {target.num_layers} layers and the drafter's had {config.target_layers}: {advice}"
        )
    if not 0 <= config.mask_token_id < target.embedding.weight.shape[0]:
        raise ValueError(f"drafter mask_token_id {config.mask_token_id} is not in the target's vocabulary: {advice}")


def context_limit(target: Target) -> int | None:
    """Tokens one sequence may hold, or None where the target names no limit."""
    return getattr(target.config, "max_position_embeddings", None)
