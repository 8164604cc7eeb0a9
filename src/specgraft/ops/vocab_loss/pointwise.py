"""Losses and logit gradients of a few rows, in place: the closed forms of algorithms.md 3.2.

Rows come few at a time so that z, p and the scratch of a row stay in the cache of a core between the passes.
Legend: n rows of one block, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from specgraft.ops.vocab_loss.naive import ALPHA_FLOOR, POINTWISE

OVERLAP = frozenset(("tv", "l1", "alpha", "lk_alpha", "lk_hybrid"))
DIVERGENCE = frozenset(("kl", "rkl", "jsd", "lk_hybrid"))


def expand(names: Collection[str]) -> frozenset[str]:
    """The values that come with those asked for; ce always does. Unknown names: ValueError."""
    unknown = set(names) - {*POINTWISE, "alpha", "hit"}
    if unknown:
        raise ValueError(f"unknown vocabulary losses {sorted(unknown)}; known: {', '.join(POINTWISE)}, alpha, hit")
    found = {"ce", *names}
    if found & OVERLAP:
        found |= {"tv", "l1", "alpha"}
    if "lk_hybrid" in found:
        found.add("kl")
    return frozenset(found)


class Pointwise:
    """Works on blocks of rows with its own scratch. `names` as `expand` gives them; `weighted`: those with a gradient."""

    def __init__(
        self, names: frozenset[str], weighted: Collection[str], eta: float, softcap: float, like: torch.Tensor, rows: int
    ) -> None:
        self.names, self.weighted, self.eta, self.softcap = names, frozenset(weighted), eta, softcap
        count = 2 + bool(names & {"jsd"}) + (softcap > 0)
        self.scratch = [like.new_empty(rows, like.shape[-1]) for _ in range(count)]

    def target(self, t: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
        """Target logits t [n,V] become p in place, or log p with p in the second buffer. Returns their argmax [n]."""
        if self.softcap > 0:
            t.div_(self.softcap).tanh_().mul_(self.softcap)
        value, index = t.max(-1)
        if p is None:
            torch.softmax(t, -1, out=t)
        else:
            torch.softmax(t, -1, out=p)
            t.sub_(_log_total(value, index, p)[:, None])
        return index

    def draft(
        self,
        z: torch.Tensor,
        labels: torch.Tensor,
        p: torch.Tensor | None,
        log_p: torch.Tensor | None,
        target_top: torch.Tensor | None,
        out: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Draft logits z [n,V] -> values into `out` (name -> [n]); z becomes the gradient of the weighted sum.

        labels [n]; p, log_p [n,V] and target_top [n] where the names need them; weights name -> [n].
        """
        count = z.shape[0]
        q, work = self.scratch[0][:count], self.scratch[1][:count]
        if self.softcap > 0:
            z.div_(self.softcap).tanh_()
            slope = torch.mul(z, z, out=self.scratch[-1][:count]).neg_().add_(1)
            z.mul_(self.softcap)
        value, index = z.max(-1)
        z_label = z.gather(-1, labels[:, None])[:, 0]
        torch.softmax(z, -1, out=q)
        lse = _log_total(value, index, q)
        out["ce"].copy_(lse - z_label)
        if "hit" in out:
            assert target_top is not None
            out["hit"].copy_(index == target_top)
        if self.names & DIVERGENCE:
            assert p is not None and log_p is not None
            self._divergences(z, q, p, log_p, lse, work, out)
        mean_below = None
        if self.names & OVERLAP:
            assert p is not None
            mean_below = self._overlap(q, p, work, out)
        if "lk_hybrid" in self.names:
            share = torch.exp(-self.eta * out["alpha"])
            out["lk_hybrid"].copy_(share * out["kl"] + (1 - share) * out["tv"])
        if self.weighted:
            self._gradient(z, q, p, work, labels, mean_below, out, weights)
            if self.softcap > 0:
                z.mul_(slope)

    def _divergences(self, z, q, p, log_p, lse, work, out) -> None:  # type: ignore[no-untyped-def]
        """kl, rkl and jsd; z becomes log q, later log(q / mix) where jsd is asked for (its buffer: scratch[2])."""
        z.sub_(lse[:, None])
        torch.sub(log_p, z, out=work)  # log(p / q)
        if "kl" in out:
            out["kl"].copy_(torch.linalg.vecdot(p, work))
        if "rkl" in out:
            out["rkl"].copy_(-torch.linalg.vecdot(q, work))
        if "jsd" in out:
            mix = torch.logaddexp(log_p, z, out=self.scratch[2][: len(z)]).sub_(math.log(2))
            to_p = torch.linalg.vecdot(p, log_p - mix)
            torch.sub(z, mix, out=mix)  # log(q / mix)
            out["jsd"].copy_((to_p + torch.linalg.vecdot(q, mix)) / 2)
        z.copy_(work)  # log(p / q), for the gradient of rkl

    def _overlap(self, q, p, work, out) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """l1, tv and alpha; returns <q, b> [n] with b = 1[q < p], and leaves q b in `work`."""
        if "lk_alpha" in self.names:  # -log alpha needs alpha itself, not 1 - tv
            out["alpha"].copy_(torch.minimum(p, q, out=work).sum(-1))
        torch.sub(p, q, out=work)
        torch.linalg.vector_norm(work, 1, -1, out=out["l1"])
        torch.mul(out["l1"], 0.5, out=out["tv"])
        if "lk_alpha" in self.names:
            out["lk_alpha"].copy_(-out["alpha"].clamp_min(ALPHA_FLOOR).log())
        else:
            out["alpha"].copy_(1 - out["tv"])
        torch.ops.aten.threshold_backward.grad_input(q, work, 0, grad_input=work)  # q where p - q > 0
        return work.sum(-1)

    def _gradient(self, z, q, p, work, labels, mean_below, out, weights) -> None:  # type: ignore[no-untyped-def]
        """ce: q - onehot; kl: q - p; tv: -q (b - <q,b>); rkl: q (log(q/p) - rkl); jsd: q (g - <q,g>) / 2, g = log(q/mix)."""
        zero = torch.zeros_like(out["ce"])
        w_ce, w_kl = weights.get("ce", zero), weights.get("kl", zero)
        w_tv = weights.get("tv", zero) + 2 * weights.get("l1", zero)
        if "lk_alpha" in weights:
            alpha = out["alpha"]
            w_tv = w_tv + torch.where(alpha >= ALPHA_FLOOR, weights["lk_alpha"] / alpha.clamp_min(ALPHA_FLOOR), zero)
        if "lk_hybrid" in weights:
            share = torch.exp(-self.eta * out["alpha"])
            w_kl = w_kl + weights["lk_hybrid"] * share
            w_tv = w_tv + weights["lk_hybrid"] * (1 - share)
        factor = w_ce + w_kl
        if mean_below is not None:
            factor = factor + w_tv * mean_below
        if "rkl" in weights:
            z.add_(out["rkl"][:, None]).mul_(-weights["rkl"][:, None]).add_(factor[:, None]).mul_(q)
        else:
            torch.mul(q, factor[:, None], out=z)
        if "jsd" in weights:
            log_ratio = self.scratch[2][: len(z)]
            half = (weights["jsd"] / 2)[:, None]
            z.add_(log_ratio.sub_(torch.linalg.vecdot(q, log_ratio)[:, None]).mul_(half).mul_(q))
        if mean_below is not None:
            z.sub_(work.mul_(w_tv[:, None]))
        if "kl" in weights or "lk_hybrid" in weights:
            z.sub_(torch.mul(p, w_kl[:, None], out=work))
        if "ce" in weights:
            z.scatter_add_(-1, labels[:, None], -w_ce[:, None])


def _log_total(value: torch.Tensor, index: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """log sum exp of logits with maximum `value` at `index`, from their softmax: the largest probability is 1 / total."""
    return value - law.gather(-1, index[:, None])[:, 0].log()
