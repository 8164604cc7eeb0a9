"""What the target's layers really give: hooks of our own and a plain pass, sharing nothing with capture.

Legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specgraft.targets.model import Target


@dataclass(frozen=True)
class Plain:
    """One conversation through the unmodified model. Filled by `plain_pass`."""

    layers: list[torch.Tensor]  # [0] the embeddings, [i + 1] the output of decoder layer i: [T, D] each
    logits: torch.Tensor  # [T, V] float32


def whole(target: Target) -> bool:
    """Whether its layers are here; `targets.outer` has none."""
    return hasattr(target, "layers")


def exact(target: Target, stored: str = "target") -> bool:
    """Whether two passes agree to rounding of float32. Sparse layers may not: groups of equal score (a rectified score is often
    0) are told apart by nothing, and another pass may read others of them. Nor do states that were `stored` in "fp8": they are
    judged as half precision is (measured: cosine 0.9996, 99 % of greedy tokens, log-probabilities 0.05 apart)."""
    if stored == "fp8":
        return False
    sparse = "indexed_attention" in (getattr(target.config, "layer_types", None) or ())
    return target.dtype in (torch.float32, torch.float64) and not sparse


@contextmanager
def eager(target: Target) -> Iterator[None]:
    """Hugging Face's own attention instead of ours, for one pass."""
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        target.model.set_attn_implementation(before)


@torch.inference_mode()
def plain_pass(target: Target, ids: Sequence[int]) -> Plain:
    """One row, no cache, no padding, the model's own mask and positions."""
    seen: dict[int, torch.Tensor] = {}

    def first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[0] = (args[0] if args else kwargs["hidden_states"])[0].clone()

    def keep(place: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[place] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return hook

    count = len(target.layers)
    handles = [target.layers[0].register_forward_pre_hook(first, with_kwargs=True)]
    handles += [layer.register_forward_hook(keep(place)) for place, layer in enumerate(target.layers, 1)]
    try:
        with eager(target):
            row = torch.tensor([list(ids)], device=target.device)
            logits = target.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    return Plain([seen[place] for place in range(count + 1)], logits)
