"""The frozen LLM in this process: forward with taps, logits, identity.

Legend: B batch, W new tokens, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specgraft.targets.slots import SlotCache


@dataclass(frozen=True)
class Step:
    """One forward pass of the target. Filled by `Target.forward`."""

    last: torch.Tensor  # [B, W, D] output of the last decoder layer, before the final norm
    taps: torch.Tensor | None  # [B, W, K, D] outputs of the tapped layers in the order asked for, or None


class Target:
    """A frozen decoder-only LLM with full attention, whatever its family.

    Layer id `i` is the output of decoder layer `i` (0-based) before any norm, the last layer included.
    """

    def __init__(self, model: Any, tokenizer: Any, path: Path, device: torch.device) -> None:
        self.model, self.tokenizer, self.path, self.device = model, tokenizer, path, device
        self.base = model.base_model
        self.config = model.config
        self.layers: nn.ModuleList = self.base.layers
        self.final_norm: nn.Module = self.base.norm
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.dtype: torch.dtype = self.head.weight.dtype
        self.end_ids = end_ids(model, tokenizer)
        parameters = inspect.signature(type(self.layers[0]).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(self._hook(index))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.eval()

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if index in self._wanted:
                self._seen[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def cache(self, rows: int, slots: int) -> SlotCache:
        """An empty key/value cache for `rows` sequences of up to `slots` tokens."""
        return SlotCache(self.num_layers, rows, slots, self.device)

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, cache: SlotCache, taps: Sequence[int] = (), rows: torch.Tensor | None = None
    ) -> Step:
        """Runs `input_ids` [B,W] behind what the cache rows hold. Lengths are moved on by the caller.

        `rows` [B] picks cache rows; None means all of them. Raises ValueError for a layer id that does not exist.
        """
        self._check(taps)
        positions, mask = cache.begin(input_ids.shape[1], rows)
        return self._run(input_ids, positions, mask, cache, taps)

    @torch.inference_mode()
    def forward_packed(
        self, input_ids: torch.Tensor, counts: torch.Tensor, cache: SlotCache, taps: Sequence[int], rows: torch.Tensor
    ) -> Step:
        """As `forward`, for rows that bring different numbers of tokens: input_ids [N] are counts[b] >= 1 tokens of row
        rows[b], one row behind the other, and so is the result, with B = 1 and W = N. No place is computed for nothing."""
        self._check(taps)
        positions, mask, packing = cache.pack(counts, rows)
        return self._run(input_ids[None], positions, mask, cache, taps, packing=packing)

    def _check(self, taps: Sequence[int]) -> None:
        top = self.num_layers - 1
        bad = [tap for tap in taps if not 0 <= tap <= top]
        if bad:
            raise ValueError(f"tap {bad[0]}: the target's decoder layers are 0 to {top}")

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
        taps: Sequence[int],
        **kwargs: Any,
    ) -> Step:
        top = self.num_layers - 1
        self._wanted = frozenset((*taps, top))
        try:
            self.base(
                input_ids=input_ids,
                attention_mask=mask.to(self.dtype),
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: cache},
                **kwargs,
            )
            last = self._seen[top]
            kept = torch.stack([self._seen[tap] for tap in taps], dim=2) if taps else None
        finally:
            self._wanted, self._seen = frozenset(), {}
        return Step(last, kept)

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """`lm_head(final_norm(last))` [.., V] in float32, from states before the final norm [.., D]."""
        return self.head(self.final_norm(last)).float()


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's (one or a list), the tokenizer's end of text and of turn."""
    found: set[int] = set()
    for source in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if source is not None:
            found.update(source if isinstance(source, list) else [source])
    if not found:
        raise ValueError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(found))
