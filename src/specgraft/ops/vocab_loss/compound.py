"""The former `compound`: kept until its callers have moved to `chunked.weighted_losses`.

No [R, V] tensor outlives its chunk. Gradients are the closed forms of algorithms.md 3.2, so that a chunk is read while
it is in cache. Sums, softmax and gradients are float32; `compute` is the dtype of the products.
Legend: R rows, C rows of one chunk, D hidden size, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from specgraft.ops.vocab_loss.naive import SlotLosses


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in float32 (float64 inputs: float64); with bfloat16 inputs the products are bfloat16.

    On CUDA bfloat16 products are summed and returned in float32. The CPU library returns bfloat16, so logits are rounded
    there (relative 2^-9): fit for training, not for reporting.
    """
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


class _Compound(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        markov: torch.Tensor,
        target_hidden: torch.Tensor,
        labels: torch.Tensor,
        head: torch.Tensor,
        weight_ce: torch.Tensor,
        weight_l1: torch.Tensor,
        weight_kl: torch.Tensor,
        chunk: int,
        compute: torch.dtype,
        with_grad: bool,
    ) -> tuple[torch.Tensor, ...]:
        wide = torch.float64 if compute == torch.float64 else torch.float32
        head_c, markov_c = head.to(compute), markov.detach().to(compute)
        count = hidden.shape[0]
        ce, l1, hit, kl = (hidden.new_empty(count, dtype=wide) for _ in range(4))
        grad_hidden, grad_embedded = torch.empty_like(hidden, dtype=wide), torch.empty_like(embedded, dtype=wide)
        grad_markov = torch.zeros_like(markov, dtype=wide)
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            h, e = hidden[rows].detach().to(compute), embedded[rows].detach().to(compute)
            z = product(h, head_c.T).add_(product(e, markov_c.T))
            t = product(target_hidden[rows].to(compute), head_c.T)
            label = labels[rows, None]
            hit[rows] = (z.argmax(-1) == t.argmax(-1)).to(wide)
            z_label = z.gather(-1, label)[:, 0]
            top = z.amax(-1, keepdim=True)
            t_norm = t.logsumexp(-1)
            p = t.softmax(-1)
            # KL = sum p (t - z) - log Z_t + log Z_z; the shift by `top` keeps the sums small
            kl[rows] = (p * t.sub_(z)).sum(-1) - t_norm + top[:, 0]
            q = z.sub_(top).exp_()
            total = q.sum(-1, keepdim=True)
            log_total = total[:, 0].log()
            kl[rows] += log_total
            ce[rows] = log_total + top[:, 0] - z_label
            q.mul_(total.reciprocal_())
            below = (q < p).to(wide)
            # sum |p-q| = 2 sum (p-q)+, and <q, b> with b = 1[q < p]
            mean_below = (q * below).sum(-1, keepdim=True)
            l1[rows] = 2 * ((p * below).sum(-1) - mean_below[:, 0])
            if not with_grad:
                continue
            # d ce = q - onehot;  d l1 = -2 q (b - <q,b>);  d kl = q - p
            w_ce, w_l1, w_kl = (weight[rows, None].to(wide) for weight in (weight_ce, weight_l1, weight_kl))
            grad = below.mul_(-2 * w_l1).add_(w_ce + w_kl + 2 * w_l1 * mean_below).mul_(q)
            grad.scatter_add_(-1, label, -w_ce)
            grad.addcmul_(p, w_kl, value=-1)
            grad_c = grad.to(compute)
            grad_hidden[rows] = product(grad_c, head_c)
            grad_embedded[rows] = product(grad_c, markov_c)
            grad_markov += product(grad_c.T, e)
        ctx.save_for_backward(grad_hidden, grad_embedded, grad_markov)
        ctx.kinds = hidden.dtype, embedded.dtype, markov.dtype
        value = (weight_ce * ce).sum() + (weight_l1 * l1).sum() + (weight_kl * kl).sum()
        ctx.mark_non_differentiable(ce, l1, hit, kl)
        return value, ce, l1, hit, kl

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        scale = grads[0]
        saved = zip(ctx.saved_tensors, ctx.kinds, strict=True)
        return (*((scale * grad).to(kind) for grad, kind in saved), *(None,) * 9)


def compound(
    hidden: torch.Tensor,
    embedded: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    head: torch.Tensor,
    markov: torch.Tensor,
    weight_ce: torch.Tensor,
    weight_l1: torch.Tensor,
    chunk: int = 64,
    compute: torch.dtype = torch.float32,
    weight_kl: torch.Tensor | None = None,
) -> tuple[torch.Tensor, SlotLosses]:
    """sum over rows of (weight_ce ce + weight_l1 l1 + weight_kl kl), and the per-slot values without graph.

    Shapes as `naive.slot_losses`; weights [R], weight_kl None for none. Gradients reach hidden, embedded and markov; the head and
    the target's states are frozen. Memory: three [chunk, V] tensors.
    """
    if weight_kl is None:
        weight_kl = torch.zeros_like(weight_ce)
    value, ce, l1, hit, kl = _Compound.apply(
        hidden, embedded, markov, target_hidden, labels, head, weight_ce, weight_l1, weight_kl, chunk, compute,
        torch.is_grad_enabled(),
    )  # fmt: skip
    return value, SlotLosses(ce=ce, l1=l1, tv=l1 / 2, alpha=1 - l1 / 2, hit=hit, kl=kl)
