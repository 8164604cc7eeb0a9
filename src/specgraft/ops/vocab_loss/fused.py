"""Losses and logit gradients of a chunk in a few passes over memory, compiled by `torch.compile` from the closed forms.

The same values as `pointwise.Pointwise` (algorithms.md 3.2); a pass there costs more than its arithmetic, and here passes
are fused: C++ loops on a CPU (a C++ compiler must be installed), Triton on CUDA. The first call of every mix of losses compiles.
Legend: n rows, S sources, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specgraft.log import say
from specgraft.ops.vocab_loss.naive import ALPHA_FLOOR
from specgraft.ops.vocab_loss.pointwise import DIVERGENCE, FAR, OVERLAP, beyond


def can_fuse(device: torch.device) -> bool:
    """Whether `torch.compile` finds what it needs on this device."""
    if device.type == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return device.type == "cuda"


@dataclass(frozen=True)
class TargetRows:
    """Target logits of some rows, left as they are, and their log-sum-exp and argmax. Filled by `Fused.target`."""

    logits: torch.Tensor  # [n, V]
    total: torch.Tensor  # [n]
    top: torch.Tensor  # [n]

    def __getitem__(self, here: slice) -> TargetRows:
        return TargetRows(self.logits[here], self.total[here], self.top[here])


class Fused:
    """As `pointwise.Pointwise`, for whole chunks. names: values; weighted: those with a gradient; wide: dtype of the sums."""

    def __init__(self, names: frozenset[str], weighted: frozenset[str], eta: float, softcap: float, wide: torch.dtype) -> None:
        self.kernel = _draft_kernel(names, weighted, eta, softcap, wide)
        self.law = _law_kernel(softcap, wide)
        self.weighted = weighted

    def target(self, t: torch.Tensor) -> TargetRows:
        """The law of target logits t [S,V]."""
        return TargetRows(t, *self.law(t))

    def draft(
        self,
        z: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        law: TargetRows | None,
        out: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Draft logits z [n,V] plus bias [n,V] -> values into `out` [n]; z becomes the gradient of the weighted sum."""
        target = (law.logits, law.total, law.top) if law is not None else (None, None, None)
        for name, value in self.kernel(z, bias, labels, *target, {name: weights[name] for name in sorted(weights)}).items():
            out[name].copy_(value)


Kernel = Callable[..., Any]


def _compiled(kernel: Kernel) -> Kernel:
    """Every mix of losses is a function of its own, but they share their code, whose number of graphs PyTorch limits."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled, broken = torch.compile(kernel, dynamic=True), False

    def run(*inputs: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                return compiled(*inputs)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                broken = True  # nothing has run yet: the same passes, not fused
                say(f"distill.fused: torch.compile fails on this machine ({type(error).__name__}); going on without")
        return kernel(*inputs)

    return run


@functools.cache
def _law_kernel(softcap: float, wide: torch.dtype) -> Kernel:
    def law(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = _capped(t.to(wide), softcap)
        return t.logsumexp(-1), t.argmax(-1)

    return _compiled(law)


@functools.cache
def _draft_kernel(names: frozenset[str], weighted: frozenset[str], eta: float, softcap: float, wide: torch.dtype) -> Kernel:
    overlap, divergence = bool(names & OVERLAP), bool(names & DIVERGENCE)

    def draft(
        z: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        t: torch.Tensor | None,
        total: torch.Tensor | None,
        top: torch.Tensor | None,
        weights: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        logits = z.to(wide) if bias is None else z.to(wide) + bias.to(wide)
        logits = _capped(logits, softcap)
        lse = logits.logsumexp(-1)
        log_q = logits - lse[:, None]
        q = torch.exp(log_q)
        out = {"ce": -log_q.gather(-1, labels[:, None])[:, 0]}
        zero = torch.zeros_like(lse)
        w_ce, w_kl = weights.get("ce", zero), weights.get("kl", zero)
        w_tv = weights.get("tv", zero) + 2 * weights.get("l1", zero)
        grad = torch.zeros_like(q)
        if t is not None and total is not None and top is not None:
            log_p = _capped(t.to(wide), softcap) - total[:, None]
            p = torch.exp(log_p)
            if "hit" in names:
                out["hit"] = (logits.gather(-1, top[:, None])[:, 0] >= logits.amax(-1)).to(wide)
            if "target_ce" in names:
                out["target_ce"] = -log_p.gather(-1, labels[:, None])[:, 0]
            if divergence:
                ratio = log_p - log_q
            if "kl" in names:
                out["kl"] = (p * torch.where(p > 0, torch.expm1((-ratio).clamp(max=FAR)) + ratio, 0.0)).sum(-1) + beyond(q, p)  # all terms >= 0
            if "rkl" in names:
                out["rkl"] = (q * torch.where(q > 0, torch.expm1(ratio.clamp(max=FAR)) - ratio, 0.0)).sum(-1) + beyond(p, q)
            if "jsd" in names:
                mix = torch.logaddexp(log_p, log_q) - math.log(2)
                of_q = (q * (log_q - mix)).sum(-1)
                middle, far = torch.exp(mix), (mix - log_p, mix - log_q)
                parts = (p * (torch.expm1(far[0].clamp(max=FAR)) - far[0]), q * (torch.expm1(far[1].clamp(max=FAR)) - far[1]))
                out["jsd"] = (parts[0].sum(-1) + parts[1].sum(-1) + beyond(middle, p) + beyond(middle, q)) / 2
            if overlap:
                gap = p - q
                below = gap > 0
                out["tv"] = torch.where(below, gap, 0.0).sum(-1)
                out["l1"] = 2 * out["tv"]
                out["alpha"] = torch.minimum(p, q).sum(-1) if "lk_alpha" in names else (1 - out["tv"]).clamp_min(0)
                missed = torch.where(below, q, 0.0).sum(-1)  # <q,b>
            if "lk_alpha" in names:
                out["lk_alpha"] = -out["alpha"].clamp_min(ALPHA_FLOOR).log()
            if "lk_hybrid" in names:
                share = torch.exp(-eta * out["alpha"])
                out["lk_hybrid"] = share * out["kl"] + (1 - share) * out["tv"]
            if "lk_alpha" in weighted:
                w_tv = w_tv + weights["lk_alpha"] / out["alpha"].clamp_min(ALPHA_FLOOR) * (out["alpha"] >= ALPHA_FLOOR)
            if "lk_hybrid" in weighted:
                w_kl, w_tv = w_kl + weights["lk_hybrid"] * share, w_tv + weights["lk_hybrid"] * (1 - share)
            if weighted & OVERLAP:
                grad = w_tv[:, None] * q * (missed[:, None] - torch.where(below, 1.0, 0.0))
            if {"kl", "lk_hybrid"} & weighted:
                grad = grad + w_kl[:, None] * (q - p)
            if "rkl" in weighted:
                grad = grad - weights["rkl"][:, None] * q * (torch.where(q > 0, ratio, 0.0) + out["rkl"][:, None])
            if "jsd" in weighted:
                grad = grad + weights["jsd"][:, None] / 2 * q * (log_q - mix - of_q[:, None])
        if not weighted:
            return out
        if "ce" in weighted:
            ids = torch.arange(z.shape[1], device=z.device)
            grad = grad + w_ce[:, None] * (q - torch.where(ids == labels[:, None], 1.0, 0.0))
        if softcap > 0:
            grad = grad * (1 - (logits / softcap) ** 2)
        z.copy_(grad)
        return out

    return _compiled(draft)


def _capped(z: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(z / softcap) * softcap if softcap > 0 else z
