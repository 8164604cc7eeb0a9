"""Linear attention of a target by the gated delta rule: GDN (one decay a head) and KDA (one a channel).

The projections, convolution weights and norms are the model's own; what a branch or a decode row starts from is the part's
business. Sources: Gated DeltaNet (2412.06464), Kimi Linear (2510.26692); layer layouts as in transformers.
Legend: R rows, T tokens, C channels of the convolution, H value heads, Hk key heads, dk and dv head sizes, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from specgraft.ops.gated_delta.choose import choose
from specgraft.targets.parts import CHUNKS, Part, Work


class Inputs(NamedTuple):
    """A layer's projections. Filled by `GatedDelta.project`."""

    mixed: torch.Tensor  # [R, T, C] queries, keys and values before the convolution
    gate: torch.Tensor  # [R, T, H, dv] of the output norm
    beta: torch.Tensor  # [R, T, H]
    decay: torch.Tensor  # [R, T, H] or [R, T, H, dk], log, <= 0


def chunk(dk: int, dv: int) -> int:
    """Tokens between kept states: the least power of two, within bounds, for which the states take no more memory than
    the keys, decays and values between them. The fewer, the less a branch has to make up for."""
    least, most = CHUNKS
    while least < most and dk * dv > least * (2 * dk + dv):
        least *= 2
    return least


class GatedDelta(ABC):
    """Runs one linear-attention module of the model over the parts of a pass."""

    def __init__(self, module: Any, layer: int, base: Any) -> None:
        self.module, self.layer = module, layer

    def __call__(self, work: Work, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return work.run(self.part, hidden)

    def part(self, part: Part, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R,T,D] -> [R,T,D]."""
        m, inputs = self.module, self.project(hidden)
        before = part.before((self.layer, "mixed"), inputs.mixed, m.conv_kernel_size - 1)
        query, key, value = self.heads(F.silu(self.convolve(torch.cat([before, inputs.mixed], 1))))
        key_state = self.layer, "state"
        size = chunk(key.shape[-1], value.shape[-1])
        out, record = choose(hidden.device)(
            query, key, value, inputs.decay, inputs.beta, part.state(key_state), size
        )
        part.keep(key_state, record)
        return self.finish(out, inputs.gate)

    def convolve(self, mixed: torch.Tensor) -> torch.Tensor:
        """[R, K-1+T, C] -> [R, T, C]: causal, one filter of K taps a channel."""
        conv = self.module.conv1d
        return F.conv1d(mixed.transpose(1, 2), conv.weight, conv.bias, groups=mixed.shape[-1]).transpose(1, 2)

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> Inputs: ...

    @abstractmethod
    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[R,T,C] -> query and key [R,T,Hk,dk], value [R,T,H,dv]."""

    @abstractmethod
    def finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[R,T,H,dv] and the gate of the same shape -> [R,T,D]."""


class Qwen(GatedDelta):
    """GDN as Qwen3-Next, Qwen3.5 and qwen4_exp build it."""

    def inputs(self, mixed: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Inputs:
        m, wide = self.module, torch.float64 if a.dtype == torch.float64 else torch.float32
        decay = -m.A_log.to(wide).exp() * F.softplus(a.to(wide) + m.dt_bias)
        return Inputs(mixed, z, b.sigmoid(), decay)

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m = self.module
        query, key, value = mixed.split([m.key_dim, m.key_dim, m.value_dim], -1)
        return *(x.unflatten(-1, (-1, m.head_k_dim)) for x in (query, key)), value.unflatten(-1, (-1, m.head_v_dim))

    def finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        m = self.module
        normed = m.norm(out.reshape(-1, m.head_v_dim), gate.reshape(-1, m.head_v_dim))
        return m.out_proj(normed.reshape(*out.shape[:2], -1))


class Fused(Qwen):
    """Qwen3-Next: one projection, interleaved by key head."""

    def project(self, hidden: torch.Tensor) -> Inputs:
        m = self.module
        query, key, value, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden), m.in_proj_ba(hidden))
        return self.inputs(torch.cat([x.flatten(2) for x in (query, key, value)], -1), z, b, a)


class Separate(Qwen):
    """Qwen3.5 and qwen4_exp: a projection each."""

    def project(self, hidden: torch.Tensor) -> Inputs:
        m = self.module
        z = m.in_proj_z(hidden).unflatten(-1, (-1, m.head_v_dim))
        return self.inputs(m.in_proj_qkv(hidden), z, m.in_proj_b(hidden), m.in_proj_a(hidden))


class KimiDelta(GatedDelta):
    """KDA as Kimi Linear builds it; the linear layers of Solar Open 2 are of this kind."""

    def project(self, hidden: torch.Tensor) -> Inputs:
        m = self.module
        mixed = torch.cat([m.q_proj(hidden), m.k_proj(hidden), m.v_proj(hidden)], -1)
        gate = m.g_b_proj(m.g_a_proj(hidden)).unflatten(-1, (-1, m.head_dim))
        return Inputs(mixed, gate, m.b_proj(hidden).sigmoid(), m.forget_gate(hidden))

    def heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m = self.module
        query, key, value = (x.unflatten(-1, (-1, m.head_dim)) for x in mixed.split([m.qkv_dim] * 3, -1))
        return query, key, value

    def finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.module.o_proj(self.module.o_norm(out, gate).flatten(2))
