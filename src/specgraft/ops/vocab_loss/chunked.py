"""The vocabulary losses a few rows at a time, value and gradient in one pass.

No [R, V] tensor exists. Gradients are the closed forms of algorithms.md 3.2, taken while a chunk's logits are at hand, so
nothing is computed twice and backward only scales. Slots of one source share its target logits and, where the latent belongs
to the source, its Markov bias and that bias's gradient. Sums, softmax and gradients are float32 (float64 for float64
inputs); `compute` is the dtype of the products.
Legend: R rows (slots), C rows and S sources of one chunk, n rows of one block, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from specgraft.ops.vocab_loss.fused import Fused, TargetRows
from specgraft.ops.vocab_loss.grouping import Chunk, chunks
from specgraft.ops.vocab_loss.naive import POINTWISE, Rows, SlotLosses
from specgraft.ops.vocab_loss.pointwise import Law, Pointwise, expand
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
    chunk: int = 128,
    compute: torch.dtype = torch.float32,
    top_k: int = 0,
    fused: bool = False,
) -> tuple[torch.Tensor, SlotLosses, torch.Tensor | None]:
    """The sum over rows and names of weights[name] * loss[name]; the per-slot losses; ids of the top_k draft logits.

    Shapes as `naive.slot_losses`; weights name -> [R], constants. The losses [R] carry no graph and are those named in
    `weights` and `want` (ce always; tv, l1 and alpha together); the ids are [R, top_k], None for top_k = 0. Gradients reach
    rows.hidden, rows.latent and markov, once per call; the head and the target's states are frozen.
    Memory: [chunk, V] for the draft, at most as much for the target and for the Markov bias, and once more for kl, rkl, jsd
    or lk_hybrid. A head that is already in `compute` is not copied. `fused` compiles the passes over logits (see `fused`): less time and memory. Same `source` and `latent_row` object: the latents' work is shared too.
    """
    names = expand([*weights, *want])
    if set(weights) - set(POINTWISE):
        raise ValueError(f"{sorted(set(weights) - set(POINTWISE))} have no gradient; weights: {', '.join(POINTWISE)}")
    if rows.target_hidden is None and names != {"ce"}:
        raise ValueError(f"{sorted(names - {'ce'})} need target_hidden")
    leaves = (rows.hidden, rows.latent, markov if rows.latent is not None else None)
    with_grad = torch.is_grad_enabled() and bool(weights)
    asked = [with_grad and leaf is not None and leaf.requires_grad for leaf in leaves]
    with torch.no_grad():
        run = _Run(rows, head, markov, weights, names, asked, eta, softcap, chunk, compute, top_k, fused)
        for piece in chunks(run.key, chunk):
            run.work(piece)
        value = run.out["ce"].new_zeros(())
        for name, weight in weights.items():
            value = value + (weight.to(value.dtype) * run.out[name]).sum()
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
        grads, ctx.grads = ctx.grads, None  # scaled in place: no second copy, so no second backward
        if grads is None:
            raise RuntimeError("weighted_losses goes backward once")
        found = [None if grad is None else grad.mul_(scales[0]).to(kind) for grad, kind in zip(grads, ctx.kinds, strict=True)]
        return None, None, *found


class _Run:
    """One call: what is asked, where results go."""

    def __init__(
        self,
        rows: Rows,
        head: torch.Tensor,
        markov: torch.Tensor | None,
        weights: Mapping[str, torch.Tensor],
        names: frozenset[str],
        asked: list[bool],
        eta: float,
        softcap: float,
        chunk: int,
        compute: torch.dtype,
        top_k: int,
        fused: bool,
    ) -> None:
        chunk = max(1, min(chunk, rows.hidden.shape[0]))
        double = torch.float64 in (compute, rows.hidden.dtype)
        self.wide = torch.float64 if double else torch.float32
        device, count = rows.hidden.device, rows.hidden.shape[0]
        self.products = Products(torch.float64 if double else compute, device)
        self.rows, self.names = rows, names
        index = torch.arange(count, device=device)
        self.target_hidden = None if names == {"ce"} else rows.target_hidden
        source = index if rows.source is None else rows.source
        self.latent_row = index if rows.latent_row is None else rows.latent_row
        if self.target_hidden is None:
            self.key = index if rows.latent is None else self.latent_row
        else:
            self.key = source
        same = self.key is self.latent_row or rows.latent_row is rows.source
        self.shared = rows.latent is not None and (same or torch.equal(self.key, self.latent_row))
        self.head = head.detach().to(self.products.kind)
        self.markov = None if markov is None or rows.latent is None else markov.detach().to(self.products.kind)
        self.weights = {name: weight.detach().to(self.wide) for name, weight in weights.items()} if any(asked) else {}
        self.out = {name: rows.hidden.new_empty(count, dtype=self.wide) for name in names}
        self.top = index.new_empty(count, top_k) if top_k > 0 else None
        shapes = (rows.hidden, rows.latent, markov)
        self.grads = [
            torch.zeros_like(shape, dtype=self.wide) if wanted and shape is not None else None
            for shape, wanted in zip(shapes, asked, strict=True)
        ]
        self.block = chunk if rows.hidden.is_cuda or fused else max(1, torch.get_num_threads())
        like = rows.hidden.new_empty((min(self.block, chunk), head.shape[0]), dtype=self.wide)
        rank_rows, head_rows = (chunk if self.markov is not None else 0), chunk * (2 if self.target_hidden is not None else 1)
        # the same memory in every chunk; what no chunk needs is never touched
        self.logits, self.bias = (like.new_empty((n, like.shape[1]), dtype=self.products.result) for n in (head_rows, rank_rows))
        self.pointwise = Pointwise(names, self.weights, eta, softcap, like)
        self.fused = Fused(names, frozenset(self.weights), eta, softcap, self.wide) if fused else None

    def work(self, piece: Chunk) -> None:
        """Values of the chunk's slots into `out`, gradients into `grads`."""
        slots, count = piece.rows, len(piece.rows)
        states = self.rows.hidden[slots].to(self.products.kind)
        if self.target_hidden is not None:  # one product: more rows to the same matrix
            states = torch.cat([states, self.target_hidden[piece.sources].to(self.products.kind)])
        logits = self.products.rows(states, self.head, self.logits)
        z = logits[:count]
        latent = bias = None
        if self.rows.latent is not None and self.markov is not None:
            latent = self.rows.latent[piece.sources if self.shared else self.latent_row[slots]].to(self.products.kind)
            bias = self.products.rows(latent, self.markov, self.bias)
        law: Law | TargetRows | None = None
        if self.target_hidden is not None:
            law = (self.fused or self.pointwise).target(logits[count:])
        out = {name: z.new_empty(count, dtype=self.wide) for name in self.names}
        weights = {name: weight[slots] for name, weight in self.weights.items()}
        for here, above in piece.blocks(self.block):
            if self.fused is not None:
                values, mine = ({name: part[here] for name, part in parts.items()} for parts in (out, weights))
                near = None if bias is None else bias[above if self.shared else here]
                if self.top is not None:
                    self.top[slots[here]] = (z[here] if near is None else z[here] + near).topk(self.top.shape[1], -1).indices
                assert law is None or isinstance(law, TargetRows)
                self.fused.draft(z[here], near, self.rows.labels[slots[here]], law and law[above], values, mine)
                continue
            block = self.pointwise.wide(z[here])
            if bias is not None:
                self.pointwise.add(block, bias[above if self.shared else here])
            if self.top is not None:
                self.top[slots[here]] = block.topk(self.top.shape[1], -1).indices
            values, mine = ({name: part[here] for name, part in parts.items()} for parts in (out, weights))
            assert not isinstance(law, TargetRows)
            self.pointwise.draft(block, self.rows.labels[slots[here]], law and law[above], values, mine)
            if self.weights and block.dtype != z.dtype:
                z[here] = block.to(z.dtype)
        for name, part in out.items():
            self.out[name][slots] = part
        if self.weights:
            self.gradients(piece, z, latent)

    def gradients(self, piece: Chunk, grad: torch.Tensor, latent: torch.Tensor | None) -> None:
        """grad [C,V] of the logits -> states, latents and Markov matrix."""
        of_hidden, of_latent, of_markov = self.grads
        if of_hidden is not None:
            of_hidden[piece.rows] = self.products.back(grad, self.head).to(self.wide)
        if latent is None or self.markov is None:
            return
        if self.shared:  # sum over the slots of a source
            total, *others = piece.layers(grad)
            for layer in others:
                total[: len(layer)].add_(layer)
            grad = total
        if of_latent is not None:
            place = piece.sources if self.shared else self.latent_row[piece.rows]
            of_latent.index_add_(0, place, self.products.back(grad, self.markov).to(self.wide))
        if of_markov is not None:
            self.products.onto(of_markov, grad, latent)
