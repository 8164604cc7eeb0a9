"""The block forward as the serving contract words it, sharing no code with the drafter: tensors by name, plain sums.

Layer attention is Q(block) over [context ; block]; ctx = hidden_norm(fc(concat of the tapped states)), K = rope(k_norm(Wk
ctx)), V = Wv ctx, so that no input norm touches the context; the block's own keys and values take the normal path.
One sequence at a time. Legend: T context tokens, K taps, D hidden size, G slots, H query heads, Hk key heads, d head size.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class Plain:
    """The contract by hand, in the dtype of its inputs; tables of angles are float32, as in every engine."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        self.t, self.c = tensors, config

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.t[f"{name}.weight"]

    def matrix(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.einsum("ti,oi->to", x, self.t[f"{name}.weight"])

    def heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(len(x), count, self.c["head_dim"])

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T,heads,d]: the pair (i, i + d/2) turns by position * theta^(-2i/d)."""
        size, theta = self.c["head_dim"], self.c["rope_parameters"]["rope_theta"]
        half = size // 2
        angle = positions.float()[:, None] * torch.tensor(theta) ** (-torch.arange(0, size, 2).float() / size)
        cos, sin = angle.cos()[:, None].to(x), angle.sin()[:, None].to(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, name: str, x: torch.Tensor, at: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        c, attention = self.c, f"{name}.self_attn"
        query_heads, key_heads = c["num_attention_heads"], c["num_key_value_heads"]
        y = self.norm(x, f"{name}.input_layernorm")
        both = torch.cat([context, y])
        where = torch.cat([torch.arange(len(context)), at])
        query = self.heads(self.matrix(y, f"{attention}.q_proj"), query_heads)
        key = self.heads(self.matrix(both, f"{attention}.k_proj"), key_heads)
        value = self.heads(self.matrix(both, f"{attention}.v_proj"), key_heads)
        query = self.rope(self.norm(query, f"{attention}.q_norm"), at)
        key = self.rope(self.norm(key, f"{attention}.k_norm"), where)
        out = []
        for head in range(query_heads):
            mine = head // (query_heads // key_heads)
            scores = query[:, head] @ key[:, mine].T / math.sqrt(c["head_dim"])  # [G, T + G], no mask
            out.append(scores.softmax(-1) @ value[:, mine])
        x = x + self.matrix(torch.cat(out, -1), f"{attention}.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.matrix(y, f"{name}.mlp.gate_proj")
        return x + self.matrix(
            gate * torch.sigmoid(gate) * self.matrix(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
        )

    def block(self, taps: torch.Tensor, anchor_state: torch.Tensor, mask_state: torch.Tensor) -> torch.Tensor:
        """States [G,D] after the final norm, of the block behind T context tokens: taps [T,K,D], embeddings [D]."""
        context = self.norm(self.matrix(taps.flatten(1), "fc"), "hidden_norm")
        size = self.c["block_size"]
        x = torch.stack([anchor_state] + [mask_state] * (size - 1))
        at = len(taps) + torch.arange(size)
        for index in range(self.c["num_hidden_layers"]):
            x = self.layer(f"layers.{index}", x, at, context)
        return self.norm(x, "norm")

    def bias(self, previous: int) -> torch.Tensor:
        """[V] added to the logits of the slot behind the token `previous`."""
        return self.t["markov_head.markov_w2.weight"] @ self.t["markov_head.markov_w1.weight"][previous]

    def confidence(self, hidden: torch.Tensor, previous: int) -> torch.Tensor:
        joined = torch.cat([hidden, self.t["markov_head.markov_w1.weight"][previous]])
        if not self.c["confidence_head_with_markov"]:
            joined = hidden
        return self.t["confidence_head.proj.weight"][0] @ joined + self.t["confidence_head.proj.bias"][0]


def plain(folder: Path) -> Plain:
    """The reference on an exported folder, in float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    return Plain(tensors, json.loads((folder / "config.json").read_text()))


@torch.no_grad()
def hugging_face_block(
    folder: Path, taps: torch.Tensor, anchor_state: torch.Tensor, mask_state: torch.Tensor
) -> torch.Tensor:
    """The same block by Hugging Face's own Qwen3 modules, built from config.json and filled strictly, in float32."""
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def part(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        cut = len(prefix) + 1
        module.load_state_dict(
            {n[cut:]: tensors.pop(n) for n in list(tensors) if n.startswith(prefix + ".")}, strict=True
        )
        return module

    width, eps = config.hidden_size, config.rms_norm_eps
    fc = part(torch.nn.Linear(len(config.target_layer_ids) * width, width, bias=False), "fc")
    hidden_norm = part(Qwen3RMSNorm(width, eps), "hidden_norm")
    final_norm = part(Qwen3RMSNorm(width, eps), "norm")
    rotary = Qwen3RotaryEmbedding(config)
    context = hidden_norm(fc(taps.flatten(1)))
    x = torch.stack([anchor_state] + [mask_state] * (config.block_size - 1))
    positions = torch.arange(len(taps) + config.block_size)[None]
    cos, sin = rotary(x, positions)
    for index in range(config.num_hidden_layers):
        layer = part(Qwen3DecoderLayer(config, index), f"layers.{index}")
        own = layer.self_attn
        y = layer.input_layernorm(x)
        both = torch.cat([context, y])
        shape = (1, len(both), -1, config.head_dim)
        # queries of the context positions are made, to rotate with Hugging Face's function, and left out
        query = own.q_norm(own.q_proj(both).view(shape)).transpose(1, 2)
        key = own.k_norm(own.k_proj(both).view(shape)).transpose(1, 2)
        value = own.v_proj(both).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, len(context) :], key, value, enable_gqa=True
        )
        x = x + own.o_proj(mixed.transpose(1, 2).flatten(2))[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    left = {name.split(".")[0] for name in tensors}
    assert left == {"markov_head", "confidence_head"}, f"not read by any Qwen3 module: {sorted(tensors)}"
    return final_norm(x)
