"""Which layers of a target need more than an attention function: one row a model, one adapter a kind of layer.

Attention layers, full or sliding, with or without sinks, reach `targets.attention` by transformers' own interface and need no
row. The other layers keep state that no mask can isolate; their `forward` is taken over for the passes of a `Target`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specgraft.targets.gated_delta import Fused, KimiDelta, Separate
from specgraft.targets.ngram import NGram
from specgraft.targets.parts import Work
from specgraft.targets.sparse import Indexer

SERVED = {"full_attention", "sliding_attention", "linear_attention", "indexed_attention"}

# model type -> [layer type ("" for any), attribute of the decoder layer, adapter]
KINDS: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
    "qwen3_next": [("linear_attention", "linear_attn", Fused)],
    "qwen3_5_text": [("linear_attention", "linear_attn", Separate)],
    "qwen3_5_moe_text": [("linear_attention", "linear_attn", Separate)],
    "qwen4_exp_text": [
        ("linear_attention", "linear_attn", Separate),
        ("indexed_attention", "self_attn.indexer", Indexer),
        ("", "ple", NGram),
    ],
    "kimi_linear": [("linear_attention", "self_attn", KimiDelta)],
}
FINAL_NORMS = ("norm", "hyper_connection_mixer")  # the latter mixes residual streams into one state


@dataclass
class Current:
    """The pass that is going on, for layers that transformers gives no keyword arguments."""

    work: Work | None = None


def final_norm(base: Any) -> nn.Module:
    """What stands between the last decoder layer and the head."""
    return next(getattr(base, name) for name in FINAL_NORMS if hasattr(base, name))


def has_final_norm(base: Any) -> bool:
    return any(hasattr(base, name) for name in FINAL_NORMS)


def take_over(base: Any, current: Current) -> None:
    """Puts the adapters of the model's row in place of its layers' `forward`; outside a pass of ours that is as it was."""
    types = getattr(base.config, "layer_types", None) or [""] * len(base.layers)
    for kind, path, adapter in KINDS.get(base.config.model_type, []):
        for number, (layer, found) in enumerate(zip(base.layers, types, strict=True)):
            if kind not in ("", found):
                continue
            module = layer
            for name in path.split("."):
                module = getattr(module, name, None)
            if module is not None:
                _replace(module, adapter(module, number, base), current)


def _replace(module: nn.Module, run: Callable[..., torch.Tensor], current: Current) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if current.work is None:
            return original(*args, **kwargs)
        if "hidden_states" in kwargs:  # models differ in how they pass it
            args = (kwargs.pop("hidden_states"), *args)
        return run(current.work, *args)

    module.forward = forward
