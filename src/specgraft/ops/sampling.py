"""The law a token is drawn from, and one draw from it.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch


@dataclass(frozen=True)
class Law:
    """How one request is sampled."""

    temperature: float = 0.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit


def distribution(logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """Probabilities [.., V] in float32 after temperature, then top-k, then top-p; temperature 0 is one-hot at the argmax."""
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits.float() / temperature
    if top_k:
        least = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p stays
        probabilities = probabilities.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: probabilities [R,V] (need not sum to 1), uniform [R] in [0,1) -> ids [R]. Never an id of mass 0."""
    total = probabilities.double().cumsum(-1)
    level = uniform.double()[:, None] * total[:, -1:]
    ids = torch.searchsorted(total, level, right=True)[:, 0]
    # rounding can put the level on the very end: step back to the last id that has mass
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).float().argmax(-1)
    return torch.minimum(ids, last)


def by_law(laws: Sequence[Law]) -> dict[Law, list[int]]:
    """Row numbers of each distinct law, in order: rows that share a law are handled in one go."""
    groups: dict[Law, list[int]] = {}
    for row, law in enumerate(laws):
        groups.setdefault(law, []).append(row)
    return groups


def distributions(logits: torch.Tensor, laws: Sequence[Law]) -> torch.Tensor:
    """`distribution` with a law per row: logits [R, .., V] -> float32 of that shape."""
    groups = by_law(laws)
    if len(groups) == 1:
        law = laws[0]
        return distribution(logits, law.temperature, law.top_p, law.top_k)
    out = torch.empty_like(logits, dtype=torch.float32)
    for law, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        out[index] = distribution(logits[index], law.temperature, law.top_p, law.top_k)
    return out


def uniforms(seed: int, name: str, count: int) -> torch.Tensor:
    """`count` numbers in [0,1) that depend on seed and name alone: not on batch, order, or where a run was resumed."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "big")
    return torch.from_numpy(numpy.random.Generator(numpy.random.Philox(key=key)).random(count))
