"""The selector's losses a few rows at a time, value and gradient in one pass.

Rows of head and codebook are gathered for one chunk of slots only, [C,k,D] and [C,k,r]; scores are small, so their
gradient is autograd's, and what lies below them is linear. Float32 inside (float64 for float64 inputs).
Legend: C rows of one chunk, S sources of one chunk, k candidates, D hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from specgraft.ops.selector_loss.naive import LEARNT, Candidates, SelectorLosses, losses_of


def weighted_selector_losses(
    rows: Candidates, head: torch.Tensor, successor: torch.Tensor, weights: Mapping[str, torch.Tensor], chunk: int = 64
) -> tuple[torch.Tensor, SelectorLosses]:
    """The sum over rows and names of weights[name] * loss[name], and the per-slot losses, without graph.

    head [V,D], frozen; successor [V,r]; weights name -> [R], constants, names of `naive.LEARNT`. Gradients reach rows.hidden,
    rows.gate and successor, once per call.
    """
    if unfit := set(weights) - set(LEARNT):
        raise ValueError(f"{sorted(unfit)} have no gradient; weights may name {', '.join(LEARNT)}")
    if rows.p is None and (unfit := set(weights) - {"selector"}):
        raise ValueError(f"{sorted(unfit)} need the target's law")
    leaves = (rows.hidden, rows.gate, successor)
    asked = [torch.is_grad_enabled() and bool(weights) and leaf.requires_grad for leaf in leaves]
    wide = torch.promote_types(rows.hidden.dtype, torch.float32)
    grads = [torch.zeros_like(leaf, dtype=wide) if wanted else None for leaf, wanted in zip(leaves, asked, strict=True)]
    value = torch.zeros((), dtype=wide, device=rows.hidden.device)
    pieces = []
    with torch.no_grad():
        # one empty piece where there are no rows, so that the names are there
        for start in range(0, max(len(rows.label), 1), chunk):
            here = slice(start, start + chunk)
            part, losses = _piece(rows, here, head, successor, {n: w[here].to(wide) for n, w in weights.items()}, grads, wide)
            value += part
            pieces.append(losses)
    out = SelectorLosses._make(None if column[0] is None else torch.cat(column) for column in zip(*pieces, strict=True))
    return (_Attach.apply(value, grads, *leaves) if any(asked) else value), out


def _piece(
    rows: Candidates,
    here: slice,
    head: torch.Tensor,
    successor: torch.Tensor,
    weights: dict[str, torch.Tensor],
    grads: list[torch.Tensor | None],
    wide: torch.dtype,
) -> tuple[torch.Tensor, SelectorLosses]:
    """Weighted sum and losses of a chunk; adds to the gradients."""
    one = replace(
        rows,
        ids=rows.ids[here],
        label=rows.label[here],
        p=None if rows.p is None else rows.p[here],
        best=None if rows.best is None else rows.best[here],
    )
    ids = torch.cat([one.ids, one.label[:, None]], -1)  # [C, k+1]
    hidden, gate = rows.hidden[here].to(wide), rows.gate[here].to(wide)
    of_head, of_book = head[ids].to(wide), successor[ids].to(wide)
    scores = torch.bmm(of_head, hidden[..., None])[..., 0] + torch.bmm(of_book, gate[..., None])[..., 0]
    learns = any(grad is not None for grad in grads)
    with torch.set_grad_enabled(learns):
        scores.requires_grad_(learns)
        losses = losses_of(one, scores[:, :-1], scores[:, -1])
        value = sum(((w * getattr(losses, name)).sum() for name, w in weights.items()), scores.new_zeros(()))
    if learns:
        (slope,) = torch.autograd.grad(value, [scores])
        of_hidden, of_gate, of_successor = grads
        if of_hidden is not None:
            of_hidden[here] = torch.bmm(slope[:, None], of_head)[:, 0]
        if of_gate is not None:
            of_gate[here] = torch.bmm(slope[:, None], of_book)[:, 0]
        if of_successor is not None:
            of_successor.index_add_(0, ids.flatten(), (slope[..., None] * gate[:, None]).flatten(0, 1))
    return value.detach(), SelectorLosses._make(None if x is None else x.detach() for x in losses)


class _Attach(torch.autograd.Function):
    """A value whose gradients are already known."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, grads: list[torch.Tensor | None], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.grads, ctx.kinds = grads, [leaf.dtype for leaf in leaves]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Any) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None  # scaled in place: no second copy, no second backward
        if grads is None:
            raise RuntimeError("weighted_selector_losses goes backward once")
        found = [None if grad is None else grad.mul_(scales[0]).to(kind) for grad, kind in zip(grads, ctx.kinds, strict=True)]
        return None, None, *found


@torch.no_grad()
def target_at(
    target_hidden: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
    head: torch.Tensor,
    chunk: int = 64,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `naive.target_at`, with logits [chunk,V] of a few sources at a time; `compute` is the dtype of the products."""
    wide = torch.promote_types(target_hidden.dtype, torch.float32)
    kind = torch.float64 if wide == torch.float64 else compute
    states, weight = target_hidden.to(kind), head.to(kind).T
    p = torch.empty(ids.shape, dtype=wide, device=ids.device)
    best = torch.empty_like(source)
    order = source.argsort(stable=True)
    sources = torch.arange(0, len(target_hidden) + chunk, chunk, device=source.device)
    edges = torch.searchsorted(source[order], sources).tolist()  # slots of a chunk of sources are neighbours in `order`
    for number, (first, end) in enumerate(pairwise(edges)):
        if first == end:
            continue
        slots, start = order[first:end], number * chunk
        logits = _product(states[start : start + chunk], weight)
        row = source[slots] - start
        p[slots] = (logits[row[:, None], ids[slots]] - logits.logsumexp(-1)[row][:, None]).exp()
        best[slots] = logits.argmax(-1)[row]
    return p, best


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, float32 for half-precision operands (rounded to theirs on a CPU)."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else (left @ right).float()
