"""How each prompt is sampled: `[regen]`, changed by `[regen.by_domain.NAME]`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from specgraft.config import RunConfig
from specgraft.records import Prompt


@dataclass(frozen=True)
class Sampling:
    """Sampling of one prompt, all its turns alike."""

    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: no limit
    max_new_tokens: int  # per answer; the prompt is not counted


def sampling_of(config: RunConfig, prompt: Prompt, split: str) -> Sampling:
    """Sampling of this prompt. What its domain leaves out is as in `[regen]`."""
    part = _of_domain(config, prompt.domain)
    return Sampling(
        temperature_of(config, prompt.id, split, prompt.domain), float(part["top_p"]), int(part["top_k"]), int(part["max_new_tokens"])
    )


def temperature_of(config: RunConfig, prompt_id: str, split: str, domain: str = "") -> float:
    """Held-out prompts are answered greedily; of the train prompts a share, picked by hash of the id, is too."""
    part = _of_domain(config, domain)
    if split == "heldout" or part["temperature"] == 0:
        return 0.0
    value = int.from_bytes(hashlib.sha256(f"greedy:{prompt_id}".encode()).digest()[:4], "big") / 2**32
    return 0.0 if value < part["greedy_share"] else float(part["temperature"])


def turn_name(prompt_id: str, turn: int) -> str:
    """What the random numbers of an answer hang on, with the seed; turns are counted from 0."""
    return prompt_id if turn == 0 else f"{prompt_id}:{turn}"


def request_seed(seed: int, name: str) -> int:
    """A seed of 31 bits for a server's request."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def _of_domain(config: RunConfig, domain: str) -> dict[str, float]:
    keys = ("temperature", "greedy_share", "top_p", "top_k", "max_new_tokens")
    own = config.regen.by_domain.get(domain)
    found = {key: getattr(config.regen, key) for key in keys}
    return found | ({key: value for key, value in own.model_dump().items() if value is not None} if own else {})
