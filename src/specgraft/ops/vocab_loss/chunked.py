"""The vocabulary losses a few rows at a time, value and gradient in one pass.

No [R, V] tensor exists. Gradients are the closed forms of algorithms.md 3.2, taken while a chunk's logits are at hand, so
nothing is computed twice and backward only scales. Sums, softmax and gradients are float32 (float64 for float64 inputs);
`compute` is the dtype of the products.
Legend: R rows (slots), C rows and S sources of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from specgraft.ops.vocab_loss.compound import compound as compound
from specgraft.ops.vocab_loss.grouping import Chunk, chunks
from specgraft.ops.vocab_loss.naive import POINTWISE, Rows, SlotLosses
from specgraft.ops.vocab_loss.pointwise import DIVERGENCE, Pointwise, expand
from specgraft.ops.vocab_loss.products import Products


def weighted_losses(
    rows: Rows,
    head: torch.Tensor,
    markov: torch.Tensor | None,
    weights: Mapping[str, torch.Tensor],
    *,
    want: Collection[str] = (),
    eta: float = 3.0,
    softcap: float = 0.0,
    chunk: int = 64,
    compute: torch.dtype = torch.float32,
    top_k: int = 0,
) -> tuple[torch.Tensor, SlotLosses, torch.Tensor | None]:
    """The sum over rows and names of weights[name] * loss[name]; the per-slot losses; ids of the top_k draft logits.

    Shapes as `naive.slot_losses`; weights name -> [R], constants. The losses [R] carry no graph and are those named in
    `weights` and `want` (ce always; tv, l1 and alpha together); the ids are [R, top_k], None for top_k = 0. Gradients reach
    rows.hidden, rows.latent and markov, once per call; the head and the target's states are frozen.
    Memory: at most four [chunk, V] buffers, five where kl, rkl, jsd or lk_hybrid is asked for.
    """
    names = expand([*weights, *want])
    unfit = set(weights) - set(POINTWISE)
    if unfit:
        raise ValueError(f"{sorted(unfit)} have no gradient; weights may name {', '.join(POINTWISE)}")
    if rows.target_hidden is None and names != {"ce"}:
        raise ValueError(f"{sorted(names - {'ce'})} need target_hidden")
    leaves = [rows.hidden, rows.latent, markov if rows.latent is not None else None]
    asked = [torch.is_grad_enabled() and bool(weights) and leaf is not None and leaf.requires_grad for leaf in leaves]
    with torch.no_grad():
        run = _Run(rows, head, markov, weights, names, asked, eta, softcap, chunk, compute, top_k)
        for piece in chunks(run.key, chunk):
            run.work(piece)
        value = torch.stack([(weights[name].to(run.wide) * run.out[name]).sum() for name in weights]).sum() if weights else run.out["ce"].new_zeros(())
    if any(asked):
        value = _Attach.apply(value, run.grads, *leaves)
    return value, SlotLosses(**run.out), run.top


class _Attach(torch.autograd.Function):
    """A value whose gradients are already known."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, grads: list[torch.Tensor | None], *leaves: torch.Tensor | None) -> torch.Tensor:
        ctx.grads, ctx.kinds = grads, [None if leaf is None else leaf.dtype for leaf in leaves]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Any) -> tuple[Any, ...]:
        grads, ctx.grads = ctx.grads, None  # scaled in place: no second copy, no second backward
        if grads is None:
            raise RuntimeError("weighted_losses goes backward once")
        found = [None if grad is None else grad.mul_(scales[0]).to(kind) for grad, kind in zip(grads, ctx.kinds, strict=True)]
        return None, None, *found


class _Run:
    """Buffers and results of one call."""

    def __init__(self, rows, head, markov, weights, names, asked, eta, softcap, chunk, compute, top_k) -> None:  # type: ignore[no-untyped-def]
        self.wide = wide = torch.float64 if compute == torch.float64 or rows.hidden.dtype == torch.float64 else torch.float32
        self.products = Products(torch.float64 if wide == torch.float64 else compute)
        count, vocab = rows.hidden.shape[0], head.shape[0]
        index = torch.arange(count, device=rows.hidden.device)
        self.rows, self.names, self.chunk = rows, names, chunk
        self.source = index if rows.source is None else rows.source
        self.latent_row = index if rows.latent_row is None else rows.latent_row
        self.has_target = names != {"ce"}
        shared = rows.latent is not None and (rows.latent_row is rows.source or torch.equal(self.latent_row, self.source))
        if self.has_target:
            self.key, self.shared = self.source, shared
        else:
            self.key, self.shared = (self.latent_row, True) if rows.latent is not None else (index, False)
        self.head = head.detach().to(self.products.kind)
        self.markov = markov.detach().to(self.products.kind) if rows.latent is not None else None
        self.weights = {name: weight.detach().to(wide) for name, weight in weights.items()} if any(asked) else {}
        self.out = {name: rows.hidden.new_empty(count, dtype=wide) for name in names}
        self.top = index.new_empty(count, top_k) if top_k > 0 else None
        shapes = (rows.hidden, rows.latent, markov)
        self.grads = [torch.zeros_like(x, dtype=wide) if wanted else None for x, wanted in zip(shapes, asked, strict=True)]
        self.buffers: dict[str, torch.Tensor] = {}
        self.like = rows.hidden.new_empty((0, vocab), dtype=wide)
        self.block = chunk if rows.hidden.is_cuda else max(1, torch.get_num_threads())
        self.pointwise = Pointwise(names, self.weights, eta, softcap, self.like, min(self.block, max(count, 1)))

    def buffer(self, name: str, rows: int) -> torch.Tensor:
        """[rows, V], the same memory in every chunk."""
        if name not in self.buffers:
            self.buffers[name] = self.like.new_empty(self.chunk, self.like.shape[1])
        return self.buffers[name][:rows]

    def work(self, piece: Chunk) -> None:
        rows, product = self.rows, self.products
        slots, sources, width = piece.rows, piece.sources, len(piece.sources)
        z = product.into(self.buffer("z", len(slots)), rows.hidden[slots], self.head.T)
        latent, bias = None, None
        if rows.latent is not None and self.shared:
            latent = rows.latent[sources]
            if len(piece.widths) == 1:
                product.onto(z, latent, self.markov.T)
            else:
                bias = product.into(self.buffer("bias", width), latent, self.markov.T)
        elif rows.latent is not None:
            latent = rows.latent[self.latent_row[slots]]
            product.onto(z, latent, self.markov.T)
        p = log_p = top = None
        if self.has_target:
            p, log_p, top = self.target(sources)
        out = {name: self.like.new_empty(len(slots)) for name in self.names}
        weights = {name: weight[slots] for name, weight in self.weights.items()}
        for offset, layer in piece.layers():
            for first in range(0, layer, self.block):
                above = slice(first, min(first + self.block, layer))  # among the sources
                here = slice(offset + above.start, offset + above.stop)  # among the slots
                if bias is not None:
                    z[here].add_(bias[above])
                if self.top is not None:
                    self.top[slots[here]] = z[here].topk(self.top.shape[1], -1).indices
                self.pointwise.draft(
                    z[here], rows.labels[slots[here]],
                    None if p is None else p[above], None if log_p is None else log_p[above], None if top is None else top[above],
                    {name: part[here] for name, part in out.items()}, {name: part[here] for name, part in weights.items()},
                )  # fmt: skip
        for name, part in out.items():
            self.out[name][slots] = part
        if self.weights:
            self.gradients(piece, z, latent)

    def target(self, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """p, log p where asked for, and the argmax of the chunk's sources."""
        t = self.products.into(self.buffer("p", len(sources)), self.rows.target_hidden[sources], self.head.T)
        p = self.buffer("law", len(sources)) if self.names & DIVERGENCE else None
        top = torch.empty_like(sources)
        for first in range(0, len(sources), self.block):
            above = slice(first, first + self.block)
            top[above] = self.pointwise.target(t[above], None if p is None else p[above])
        return (t, None, top) if p is None else (p, t, top)

    def gradients(self, piece: Chunk, grad: torch.Tensor, latent: torch.Tensor | None) -> None:
        """grad [C,V] of the logits -> states, latents and Markov matrix."""
        hidden, of_latent, of_markov = self.grads
        if hidden is not None:
            hidden[piece.rows] = self.products.of(grad, self.head)
        if latent is None:
            return
        if self.shared and len(piece.widths) > 1:  # sum over the slots of a source
            total = grad[: piece.widths[0]]
            for offset, width in list(piece.layers())[1:]:
                total[:width].add_(grad[offset : offset + width])
            grad = total
        if of_latent is not None:
            place = piece.sources if self.shared else self.latent_row[piece.rows]
            of_latent.index_add_(0, place, self.products.of(grad, self.markov))
        if of_markov is not None:
            self.products.onto(of_markov, grad.T, latent)
