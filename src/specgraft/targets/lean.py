"""The pass of a Llama- or Qwen-shaped target without its model's Python: the same operations in the same order, on static caches.

A layer of transformers is some sixty operations behind hooks, keyword dictionaries and wrappers, which for a small model cost
as much as reading its weights. Here it is about twenty. Only for the classes named below, and only after the pass has been compared
with the model's own (`of`); every other target takes `Target.run`, which stays the definition.
Legend: N tokens of a pass, D hidden size, K taps, H query and Hk key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from specgraft.targets.product import Product, packs
from specgraft.targets.static import Places, StaticCache

FAMILIES = ("Llama", "Qwen2", "Qwen3")  # transformers' own classes with these prefixes
ROPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the text's length
NEAR = {torch.float64: 1e-4, torch.float32: 1e-4}  # relative distance of last states; norms are float32 whatever the dtype is
NEAR_HALF = 0.03


class LeanLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, pack: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        three = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = product(three, pack)
        self.out = product([attention.o_proj], pack)
        self.gate_up = product([mlp.gate_proj, mlp.up_proj], pack)
        self.down = product([mlp.down_proj], pack)
        self.before, self.behind = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.scale: float = attention.scaling
        self.size: int = attention.head_dim
        self.heads = len(attention.q_proj.weight) // self.size, len(attention.k_proj.weight) // self.size

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: Places, kept: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """x [N, D], tables [N, 1, d] (`sin` negative in its first half) -> [N, D]; `kept` holds the layer's keys and values."""
        query_heads, key_heads = self.heads
        every = self.qkv(norm(x, self.before)).view(len(x), -1, self.size)
        both, value = every[:, :-key_heads], every[:, -key_heads:]
        if self.q_norm is not None:
            both = torch.cat([norm(both[:, :query_heads], self.q_norm), norm(both[:, query_heads:], self.k_norm)], 1)
        turned = both * cos
        turned += both.roll(self.size // 2, -1) * sin
        places.write(kept[0], turned[:, query_heads:])
        places.write(kept[1], value)
        x = self.out(places.attend(turned[:, :query_heads], *kept, self.scale)).add_(x)
        gate, up = self.gate_up(norm(x, self.behind)).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up)).add_(x)


class Lean:
    """A target's layers, embedding and head. Made by `of`."""

    def __init__(self, model: Any) -> None:
        base, self.pack = model.base_model, packs(model)
        self.embedding, self.rotary, self.final_norm = base.embed_tokens, base.rotary_emb, base.norm
        self.layers = [LeanLayer(layer, self.pack) for layer in base.layers]
        self.head = product([model.get_output_embeddings()], self.pack)
        self.cos = self.sin = self.embedding.weight.new_zeros(0, 1, self.layers[0].size)

    @property
    def current(self) -> bool:
        """Whether the model still has the weights that were read."""
        return all(p.current for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)) and self.head.current

    def cache(self, rows: int, slots: int) -> StaticCache:
        if slots > len(self.cos):
            places = torch.arange(max(slots, 2 * len(self.cos)), device=self.cos.device)
            cos, sin = self.rotary(self.cos, places[None])
            half = self.layers[0].size // 2
            self.cos, self.sin = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
        first = self.layers[0]
        return StaticCache(rows, slots, len(self.layers), first.heads, first.size, self.cos)

    def run(self, ids: torch.Tensor, places: Places, cache: StaticCache, taps: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids [N] -> last [N, D] before the final norm, and the taps [N, K, D] where any are asked for."""
        x = F.embedding(ids, self.embedding.weight)
        cos, sin = self.cos[places.positions], self.sin[places.positions]
        kept = x.new_empty(len(x), len(taps), x.shape[1]) if taps else None
        for number, (layer, store) in enumerate(zip(self.layers, cache.layers, strict=True)):
            x = layer(x, cos, sin, places, store)
            for place, tap in enumerate(taps):
                if tap == number:
                    assert kept is not None
                    kept[:, place] = x
        return x, kept

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """float32 [.., V] of states before the final norm [.., D]."""
        return self.head(norm(last, self.final_norm)).float()


def norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """transformers' RMSNorm; in float32 the same numbers in one call."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    normed: torch.Tensor = module(x)
    return normed


def product(parts: list[nn.Linear], pack: bool) -> Product:
    return Product([part.weight for part in parts], [part.bias for part in parts], pack)


def known(model: Any) -> bool:
    """Whether every class and setting that a pass depends on is one that this file was written for."""
    base, config = model.base_model, model.config
    family = next((name for name in FAMILIES if type(base).__name__ == f"{name}Model"), None)
    if family is None or not isinstance(model.get_output_embeddings(), nn.Linear):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    if not full or config.hidden_act not in ("silu", "swish") or rope.get("rope_type", "default") not in ROPES:
        return False
    classes = {f"{family}{name}" for name in ("DecoderLayer", "Attention", "MLP", "RMSNorm")} | {"Linear", "SiLUActivation", "SiLU"}
    return all(
        type(module).__name__ in classes
        and type(module).__module__.startswith(("transformers.models.", "transformers.activations", "torch.nn.modules."))
        and "forward" not in vars(module)
        and (type(module) is not nn.Linear or module.weight.dtype.is_floating_point)
        for layer in base.layers
        for module in layer.modules()
    )


@torch.inference_mode(False)
@torch.no_grad()
def of(model: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Lean | None:
    """The lean pass of this model, or None where it is not known or gives other states than `own`: ids [1, W] -> last [1, W, D]."""
    if not known(model):
        return None
    lean = Lean(model)
    ids = (torch.arange(5, device=lean.cos.device) * 7 + 3)[None] % len(lean.embedding.weight)
    cache = lean.cache(1, 5)
    first, _ = lean.run(ids[0, :3], cache.begin(3, None), cache)
    cache.lengths += 3
    second, _ = lean.run(ids[0, 3:], cache.begin(2, None), cache)
    expected, found = own(ids)[0].double(), torch.cat([first, second]).double()
    distance = (found - expected).norm() / expected.norm()
    return lean if float(distance) < NEAR.get(first.dtype, NEAR_HALF) else None
