"""The gated delta rule, one token at a time: the definition, by which the fast paths are judged.

    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q        (targets.md 2.1)

GDN (arXiv 2412.06464) has one decay a head, KDA (Kimi Linear, arXiv 2510.26692) one a key channel. A token with g = 0 and
beta = 0 leaves the state as it is.
Legend: R rows, T tokens, H value heads, Hk query and key heads, dk key and dv value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [R,T,H,dv] in v's dtype and the states before the first and after every token, [R,T+1,H,dk,dv].

    q, k [R,T,Hk,dk], neither normalised nor scaled, H a multiple of Hk; v [R,T,H,dv]; g [R,T,H] or [R,T,H,dk], log decays <= 0;
    beta [R,T,H]; initial [R,H,dk,dv], None is zero. Computed in float32 (float64 where v is float64), as are the states.
    """
    dtype = wide(v)
    rows, tokens, heads, dv = v.shape
    q, k = (normalised(x.to(dtype)).repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    values, decay, rate = v.to(dtype), channels(g.to(dtype)).exp(), beta.to(dtype)
    state = q.new_zeros(rows, heads, q.shape[-1], dv) if initial is None else initial.to(dtype)
    out, states = [], [state]
    for t in range(tokens):
        state = state * decay[:, t, :, :, None]
        read = (state * k[:, t, :, :, None]).sum(-2)
        new = rate[:, t, :, None] * (values[:, t] - read)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2))
        states.append(state)
    return torch.stack(out, 1).to(v.dtype) if out else torch.zeros_like(v), torch.stack(states, 1)


def wide(v: Tensor) -> torch.dtype:
    """The dtype of the state and of everything that goes into it."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def normalised(x: Tensor) -> Tensor:
    """x [..,d] with squares that sum to 1 (a little less: the models' epsilon; 0 stays 0)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def channels(g: Tensor) -> Tensor:
    """Log decays [R,T,H] (GDN) or [R,T,H,dk] (KDA) as [R,T,H,1 or dk]."""
    return g if g.dim() == 4 else g[..., None]
