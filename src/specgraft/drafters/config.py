"""Shape of a drafter, as stored beside its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DrafterConfig:
    """Everything needed to build a drafter without the run that made it."""

    kind: str
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
    markov_rank: int
    markov_head: str = "vanilla"
    confidence_with_markov: bool = True
    confidence_detach: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "taps": list(self.taps)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """Raises ValueError naming fields that are missing or unknown: a missing field is never a default."""
        names = set(cls.__dataclass_fields__)
        if odd := names ^ set(data):
            raise ValueError(f"drafter config: fields {', '.join(sorted(odd))} are missing or unknown")
        return cls(**{**data, "taps": tuple(data["taps"])})
