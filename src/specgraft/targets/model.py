"""The frozen LLM in this process: forward with taps, logits, identity.

Legend: B batch, W new tokens, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specgraft.targets import lean, text
from specgraft.targets.kinds import Current, final_norm, take_over
from specgraft.targets.parts import Work
from specgraft.targets.slots import SlotCache
from specgraft.targets.static import Places, StaticCache


@dataclass(frozen=True)
class Step:
    """One forward pass of the target. Filled by `Target.forward`."""

    last: torch.Tensor  # [B, W, E] output of the last decoder layer, before the final norm; E = D but with several streams
    taps: torch.Tensor | None  # [B, W, K, D] outputs of the tapped layers in the order asked for, or None


class Target:
    """A frozen decoder-only LLM, whatever its family and the kinds of its layers (`targets.kinds`).

    Layer id `i` is the output of decoder layer `i` (0-based) before any norm, the last layer included. Where a layer's output
    is several residual streams (hyper-connections, `streams` > 1), a tap is their mean [.., D] and `last` all of them
    [.., streams * D], from which the final mixer makes the state that the head reads.
    """

    def __init__(self, model: Any, tokenizer: Any, path: Path, device: torch.device) -> None:
        self.model, self.tokenizer, self.path, self.device = model, tokenizer, path, device
        self.base = model.base_model
        self.config = model.config
        self.layers: nn.ModuleList = self.base.layers
        self.final_norm: nn.Module = final_norm(self.base)
        self.streams: int = getattr(self.config, "hc_count", None) or 1
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.dtype: torch.dtype = self.head.weight.dtype
        self.end_ids = end_ids(model, tokenizer)
        self.context = text.context_of(model.config)
        self._turn = threading.RLock()  # a thread may make features while another scores branches
        self._work = Current()
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, torch.Tensor] = {}
        self._lean: lean.Lean | None = None
        self._tried = False  # whether a lean pass was looked for; the first cache does that
        take_over(self.base, self._work)
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

    def cache(self, rows: int, slots: int) -> SlotCache | StaticCache:
        """An empty cache for `rows` sequences of up to `slots` tokens; its kind says how passes over it run: a `StaticCache` by the
        lean pass (`targets.lean`), where this model has one and nobody but us listens to its layers."""
        fast = self.lean() if all(len(layer._forward_hooks) == 1 and not layer._forward_pre_hooks for layer in self.layers) else None
        return SlotCache(rows, slots, self.device) if fast is None else fast.cache(rows, slots)

    def lean(self) -> lean.Lean | None:
        """The lean pass, compared with `run` when it is first asked for and when weights have changed; None where there is none."""
        with self._turn:
            if not self._tried or (self._lean is not None and not self._lean.current):
                self._tried, self._lean = True, None
                self._lean = lean.of(self.model, self._own)
            return self._lean

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        """Last states [B, W, D] of texts ids [B, W] by the model's own pass."""
        cache = SlotCache(len(ids), ids.shape[1], self.device)
        return self.run(cache.begin(ids)).last

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: SlotCache | StaticCache,
        taps: Sequence[int] = (),
        rows: torch.Tensor | None = None,
        reach: int | None = None,
    ) -> Step:
        """Runs `input_ids` [B,W] behind what the cache rows hold. Lengths are moved on by the caller.

        `rows` [B] picks cache rows; None means all of them. `reach`: no row will hold more places than this; whoever knows spares a
        device that works ahead of us the wait for its lengths. Raises ValueError for a layer id that does not exist.
        """
        if isinstance(cache, SlotCache):
            return self.run(cache.begin(input_ids, rows), taps)
        last, kept = self._pass(input_ids.flatten(), cache.begin(input_ids.shape[1], rows, reach), cache, taps)
        shape = tuple(input_ids.shape)
        return Step(last.unflatten(0, shape), None if kept is None else kept.unflatten(0, shape))

    @torch.inference_mode()
    def forward_packed(
        self, input_ids: torch.Tensor, counts: torch.Tensor, cache: SlotCache | StaticCache, taps: Sequence[int], rows: torch.Tensor
    ) -> Step:
        """As `forward`, for rows that bring different numbers of tokens: input_ids [N] are counts[b] >= 1 tokens of row
        rows[b], one row behind the other, and so is the result, with B = 1 and W = N. No place is computed for nothing."""
        if isinstance(cache, SlotCache):
            return self.run(cache.pack(input_ids, counts, rows), taps)
        last, kept = self._pass(input_ids, cache.pack(counts, rows), cache, taps)
        return Step(last[None], None if kept is None else kept[None])

    def _pass(
        self, ids: torch.Tensor, places: Places, cache: StaticCache, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._refuse(taps)
        with self._turn:
            assert self._lean is not None, "this cache is another target's"
            return self._lean.run(ids, places, cache, taps)

    def _refuse(self, taps: Sequence[int]) -> None:
        top = self.num_layers - 1
        if bad := [tap for tap in taps if not 0 <= tap <= top]:
            raise ValueError(f"tap {bad[0]}: the target's decoder layers are 0 to {top}")

    @torch.inference_mode()
    def run(self, work: Work, taps: Sequence[int] = ()) -> Step:
        """The pass that `work` describes: a decode loop's (`forward`), or one over stem and branches (`targets.scoring`).
        Raises ValueError for a layer id that does not exist."""
        self._refuse(taps)
        top = self.num_layers - 1
        # a mask of four dimensions is handed through as it is: what is visible is said by the parts of the work
        placeholder = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        with self._turn:
            self._wanted, self._work.work = frozenset((*taps, top)), work
            try:
                self.base(
                    input_ids=work.ids, attention_mask=placeholder, position_ids=work.positions, use_cache=False, work=work
                )
                last = self._seen[top]
                kept = torch.stack([self.tap(self._seen[tap]) for tap in taps], dim=2) if taps else None
            finally:
                self._wanted, self._seen, self._work.work = frozenset(), {}, None
        return Step(last, kept)

    def tap(self, output: torch.Tensor) -> torch.Tensor:
        """What is captured of a decoder layer's output [.., streams * D]: [.., D]."""
        return output if self.streams == 1 else output.unflatten(-1, (self.streams, -1)).mean(-2)

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """`lm_head(final_norm(last))` [.., V] in float32, from states before the final norm [.., D]."""
        if self._lean is not None and self._lean.head.current:
            return self._lean.logits(last)
        return self.head(self.final_norm(last)).float()


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer, of a loaded model: see `targets.text.end_ids`."""
    return text.end_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
