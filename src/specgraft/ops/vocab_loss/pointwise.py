"""Losses and logit gradients of a few rows, in place: the closed forms of algorithms.md 3.2.

Rows come few at a time so that z, p and the scratch of a row stay in the cache of a core between the passes. Ops are chosen
by their measured time on a CPU: a pass over the vocabulary costs more than its arithmetic.
Legend: n rows of one block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from specgraft.ops.vocab_loss.naive import ALPHA_FLOOR, POINTWISE

Named = Mapping[str, torch.Tensor]  # loss name -> [n]

OVERLAP = frozenset(("tv", "l1", "alpha", "lk_alpha", "lk_hybrid"))
DIVERGENCE = frozenset(("kl", "rkl", "jsd", "lk_hybrid"))
FAR = 30.0  # log-ratios above it are left to `beyond`: exp of a few times that is no float32


def expand(names: Collection[str]) -> frozenset[str]:
    """The values that come with those asked for; ce always does. Unknown names: ValueError."""
    unknown = set(names) - {*POINTWISE, "alpha", "hit", "target_ce"}
    if unknown:
        raise ValueError(f"unknown vocabulary losses {sorted(unknown)}; known: {', '.join(POINTWISE)}, alpha, hit, target_ce")
    found = {"ce", *names}
    if found & OVERLAP:
        found |= {"tv", "l1", "alpha"}
    if "lk_hybrid" in found:
        found.add("kl")
    return frozenset(found)


@dataclass(frozen=True)
class Law:
    """The target's side of some rows. Filled by `Pointwise.target`."""

    p: torch.Tensor  # [n, V]
    log_p: torch.Tensor | None  # [n, V] where a divergence is asked for
    top: torch.Tensor  # [n] argmax where `hit` is asked for

    def __getitem__(self, here: slice) -> Law:
        return Law(self.p[here], None if self.log_p is None else self.log_p[here], self.top[here])


class Pointwise:
    """Works on blocks of at most len(like) rows with its own scratch.

    names: values, as `expand` gives them; weighted: those with a gradient; like [n,V]: shape and dtype of a block.
    """

    def __init__(
        self, names: frozenset[str], weighted: Collection[str], eta: float, softcap: float, like: torch.Tensor
    ) -> None:
        self.names, self.weighted, self.eta, self.softcap = names, frozenset(weighted), eta, softcap
        self.like = like
        self.held: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, rows: int) -> torch.Tensor:
        """[rows, V], the same memory every time."""
        if name not in self.held:
            self.held[name] = torch.empty_like(self.like)
        return self.held[name][:rows]

    def wide(self, z: torch.Tensor) -> torch.Tensor:
        """z [n,V] itself, or its wide copy where it is narrow."""
        return z if z.dtype == self.like.dtype else self.scratch("wide", len(z)).copy_(z)

    def add(self, z: torch.Tensor, bias: torch.Tensor) -> None:
        """z += bias [n,V], which may be narrow."""
        z.add_(bias if bias.dtype == z.dtype else self.scratch("q", len(z)).copy_(bias))

    def target(self, t: torch.Tensor) -> Law:
        """The law of target logits t [S,V], which are overwritten; `like` rows at a time."""
        divergence = bool(self.names & DIVERGENCE)
        log_p = (t if t.dtype == self.like.dtype else t.to(self.like.dtype)) if divergence else None
        p = t if log_p is None and t.dtype == self.like.dtype else torch.empty_like(t, dtype=self.like.dtype)
        top = torch.zeros(len(t), dtype=torch.long, device=t.device)
        for first in range(0, len(t), len(self.like)):
            here = slice(first, first + len(self.like))
            block = self.wide(t[here]) if log_p is None else log_p[here]
            if self.softcap > 0:
                block.div_(self.softcap).tanh_().mul_(self.softcap)
            if "hit" in self.names:
                torch.argmax(block, -1, out=top[here])
            if log_p is None:
                torch.softmax(block, -1, out=p[here])
                continue
            value = block.amax(-1)
            torch.softmax(block, -1, out=p[here])
            block.sub_(_log_total(value, p[here])[:, None])
        return Law(p, log_p, top)

    def draft(self, z: torch.Tensor, labels: torch.Tensor, law: Law | None, out: Named, weights: Named) -> None:
        """Draft logits z [n,V] -> values into `out`; z becomes the gradient of the weighted sum.

        labels [n]; law of the same rows, None where ce alone is asked for; weights: the weighted ones.
        """
        q = self.scratch("q", len(z))
        if self.softcap > 0:
            z.div_(self.softcap).tanh_()
            slope = torch.mul(z, z, out=self.scratch("slope", len(z))).neg_().add_(1)
            z.mul_(self.softcap)
        value = z.amax(-1)
        if law is not None and "hit" in out:
            out["hit"].copy_(z.gather(-1, law.top[:, None])[:, 0] == value)
        z_label = z.gather(-1, labels[:, None])[:, 0]
        torch.softmax(z, -1, out=q)
        lse = _log_total(value, q)
        torch.sub(lse, z_label, out=out["ce"])
        if law is not None:
            if "target_ce" in out:
                out["target_ce"].copy_(law.p.gather(-1, labels[:, None])[:, 0].log_().neg_())
            if law.log_p is not None:
                self._divergences(z, q, law.p, law.log_p, lse, out)
            if self.names & OVERLAP:
                self._overlap(z, q, law.p, out)
            if "lk_hybrid" in out:
                share = torch.exp(-self.eta * out["alpha"])
                out["lk_hybrid"].copy_(share * out["kl"] + (1 - share) * out["tv"])
        if self.weighted:
            self._gradient(z, q, law, labels, out, weights)
            if self.softcap > 0:
                z.mul_(slope)

    def _divergences(
        self, z: torch.Tensor, q: torch.Tensor, p: torch.Tensor, log_p: torch.Tensor, lse: torch.Tensor, out: Named
    ) -> None:
        """kl, rkl, jsd. Leaves log(p/q) in scratch `ratio` and log(q/mix) in `mix`; z is free afterwards."""
        z.sub_(lse[:, None])  # log q
        ratio = torch.sub(log_p, z, out=self.scratch("ratio", len(z)))
        work = self.scratch("gap", len(z))  # sums of terms that are all >= 0, as sum p = sum q = 1: no digits cancel
        if "kl" in out:
            out["kl"].copy_(torch.linalg.vecdot(p, torch.neg(ratio, out=work).clamp_max_(FAR).expm1_().add_(ratio)))
            out["kl"].add_(beyond(q, p, work))
        if "rkl" in out:
            out["rkl"].copy_(torch.linalg.vecdot(q, torch.clamp(ratio, max=FAR, out=work).expm1_().sub_(ratio)))
            out["rkl"].add_(beyond(p, q, work))
        if "jsd" in out:
            mix = torch.logaddexp(log_p, z, out=self.scratch("mix", len(z))).sub_(math.log(2))
            middle = mix.exp()
            far = torch.sub(mix, log_p, out=work)
            of_p = torch.linalg.vecdot(p, far.clamp(max=FAR).expm1_().sub_(far)) + beyond(middle, p, work)
            torch.sub(z, mix, out=mix)
            torch.neg(mix, out=work).clamp_max_(FAR).expm1_().add_(mix)
            of_q = torch.linalg.vecdot(q, work) + beyond(middle, q, work)
            out["jsd"].copy_((of_p + of_q) / 2)

    def _overlap(self, z: torch.Tensor, q: torch.Tensor, p: torch.Tensor, out: Named) -> None:
        """tv, l1, alpha, lk_alpha. z becomes q b, b = 1[q < p]."""
        gap = self.scratch("gap", len(z))
        if "lk_alpha" in out:  # -log alpha needs alpha itself, not 1 - tv
            torch.sum(torch.minimum(p, q, out=gap), -1, out=out["alpha"])
            out["lk_alpha"].copy_(-out["alpha"].clamp_min(ALPHA_FLOOR).log())
        torch.sub(p, q, out=gap)
        torch.ops.aten.threshold_backward.grad_input(q, gap, 0, grad_input=z)  # q where gap > 0, else 0, in one pass
        torch.sum(gap.clamp_min_(0), -1, out=out["tv"])  # sum |p - q| = 2 sum (p - q)+
        torch.mul(out["tv"], 2, out=out["l1"])
        if "lk_alpha" not in out:
            torch.sub(1, out["tv"], out=out["alpha"]).clamp_min_(0)

    def _gradient(
        self, z: torch.Tensor, q: torch.Tensor, law: Law | None, labels: torch.Tensor, out: Named, weights: Named
    ) -> None:
        """z becomes the sum of w times
        ce: q - onehot; kl: q - p; tv: -q (b - <q,b>); rkl: q (log(q/p) - rkl); jsd: q (g - <q,g>) / 2 with g = log(q/mix).
        """
        zero = torch.zeros_like(out["ce"])
        w_ce, w_kl = weights.get("ce", zero), weights.get("kl", zero)
        w_tv = weights.get("tv", zero) + 2 * weights.get("l1", zero)
        if "lk_alpha" in weights:
            alpha = out["alpha"]
            w_tv = w_tv + weights["lk_alpha"] / alpha.clamp_min(ALPHA_FLOOR) * (alpha >= ALPHA_FLOOR)
        if "lk_hybrid" in weights:
            share = torch.exp(-self.eta * out["alpha"])
            w_kl = w_kl + weights["lk_hybrid"] * share
            w_tv = w_tv + weights["lk_hybrid"] * (1 - share)
        work = self.scratch("gap", len(z))
        if self.weighted & OVERLAP:
            factor = w_ce + w_kl + w_tv * z.sum(-1)  # <q,b>
            z.mul_(-w_tv[:, None]).add_(torch.mul(q, factor[:, None], out=work))
        else:
            torch.mul(q, (w_ce + w_kl)[:, None], out=z)
        if "rkl" in weights:
            ratio = self.scratch("ratio", len(z)).add_(out["rkl"][:, None])
            z.sub_(ratio.mul_(weights["rkl"][:, None]).mul_(q))
        if "jsd" in weights:
            mix = self.scratch("mix", len(z))
            mix.sub_(torch.linalg.vecdot(q, mix)[:, None]).mul_(weights["jsd"][:, None] / 2)
            z.add_(mix.mul_(q))
        if law is not None and ("kl" in weights or "lk_hybrid" in weights):
            z.sub_(torch.mul(law.p, w_kl[:, None], out=work))
        if "ce" in weights:
            z.scatter_add_(-1, labels[:, None], -w_ce[:, None])


def beyond(high: torch.Tensor, low: torch.Tensor, work: torch.Tensor | None = None) -> torch.Tensor:
    """What low (exp(min(r, FAR)) - 1) leaves out of high - low, r = log(high/low), summed: only ids with r > FAR count."""
    return torch.sub(high, low * math.exp(FAR), out=work).clamp_min_(0).sum(-1)


def _log_total(value: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """log sum exp of logits with maximum `value`, from their softmax: its largest probability is 1 / total."""
    return value - law.amax(-1).log()
