"""Shape of a drafter, as stored beside its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter without the run that made it. What a kind does not have is 0 or False."""

    kind: str  # a row of `registry.KINDS`
    draft_tokens: int  # G
    layers: int
    hidden_size: int  # the target's
    vocab_size: int  # the target's
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    max_positions: int  # the target's context length
    taps: tuple[int, ...]  # target layer ids in the order of `fc`'s columns
    target_layers: int
    mask_token_id: int
    layer_types: tuple[str, ...] = ()  # one a layer; empty: all full attention
    sliding_window: int = 0  # context tokens of a sliding layer, counted from the query
    block_causal: bool = False  # slots of a block see slots before them only
    markov_rank: int = 0
    markov_head: str = "vanilla"  # vanilla, gated, rnn
    confidence: bool = False
    confidence_with_markov: bool = True
    confidence_detach: bool = False
    conv_group: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0
    selector_top_k: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of a drafter that is not ours

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.layers)
        if len(self.layer_types) != self.layers or set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(f"layer_types={list(self.layer_types)}: name {FULL} or {SLIDING} for each of {self.layers} layers")
        if SLIDING in self.layer_types and self.sliding_window <= self.draft_tokens:
            raise ValueError(
                f"sliding_window={self.sliding_window}: sliding layers need a window longer than a block of {self.draft_tokens} drafts"
            )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "taps": list(self.taps), "layer_types": list(self.layer_types)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """Raises ValueError naming fields that are missing or unknown: a missing field is never a default."""
        names = set(cls.__dataclass_fields__)
        if odd := names ^ set(data):
            raise ValueError(f"drafter config: fields {', '.join(sorted(odd))} are missing or unknown")
        return cls(**{**data, "taps": tuple(data["taps"]), "layer_types": tuple(data["layer_types"])})
