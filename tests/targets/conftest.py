"""The oracle: transformers' own Llama with the same weights, eager attention, no cache of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specgraft.targets.model import Target


@dataclass(frozen=True)
class Plain:
    """One row through the unmodified model."""

    layers: list[torch.Tensor]  # [T, D] output of each decoder layer, kept by hooks on the layers
    logits: torch.Tensor  # [T, V]
    last_hidden: torch.Tensor  # [T, D] transformers' own last hidden state, which is behind the final norm


class Oracle:
    def __init__(self, target: Target) -> None:
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        self.model: Any = LlamaForCausalLM(config).to(target.dtype)
        self.model.load_state_dict(target.model.state_dict())
        self.model.eval()
        assert self.model.config._attn_implementation == "eager"

    @torch.no_grad()
    def run(self, ids: list[int]) -> Plain:
        kept: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output)[0])

        hooks = [layer.register_forward_hook(keep) for layer in self.model.model.layers]
        try:
            out = self.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        finally:
            for hook in hooks:
                hook.remove()
        return Plain(kept, out.logits[0], out.hidden_states[-1][0])

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
        """transformers' own `generate`, one prompt."""
        out = self.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=count, eos_token_id=list(ends), pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()


@pytest.fixture(scope="session")
def oracle() -> Callable[[Target], Oracle]:
    return Oracle
