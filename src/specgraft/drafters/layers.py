"""Qwen3-shaped draft layers: RMSNorm, rotary positions, q/k norm, grouped queries, SwiGLU (what the engines load).

Legend: B batch, N blocks, S slots a block, T context tokens, D hidden size, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specgraft.drafters.config import DrafterConfig
from specgraft.ops.block_attention.choose import block_attention
from specgraft.ops.block_attention.spans import Spans


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


def initialise(*parts: nn.Module) -> None:
    """N(0, 0.02) for every matrix (DeepSpec)."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)


def rope_tables(positions: torch.Tensor, size: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [.., size] of positions [..], half-split layout, always float32 (bfloat16 tables cost acceptance)."""
    inverse = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
    angle = positions.float()[..., None] * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [.., H, d] with tables [.., d]."""
    left, right = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat([-right, left], -1) * sin.unsqueeze(-2)


class Attention(nn.Module):
    """Block queries over [context ; own block]; context keys and values come from the injected states."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.eps
        self.heads, self.kv_heads, self.size = heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(hidden, heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, eps)
        self.k_norm = RMSNorm(size, eps)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values [.., Hk, d] of states x [.., D]; the same projections serve context and block."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.size)))
        return rotate(key, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.size)).to(key.dtype)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        spans: Spans,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """x [B,N,S,D], context keys and values [B,T,Hk,d], tables [B,N,S,d] -> [B,N,S,D]."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.size))), cos, sin)
        key, value = self.keys_values(x, cos, sin)
        with torch.autocast(x.device.type, enabled=False):
            out = block_attention(query, *context, key, value, spans)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One draft layer on block states; the context enters through attention only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        spans: Spans,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, spans, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))
