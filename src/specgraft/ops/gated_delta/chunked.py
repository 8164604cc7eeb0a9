"""The gated delta rule, C tokens at a time, and the state after any of them.

Within a chunk the corrected values u solve a unit triangular system (the "UT transform" of arXiv 2412.06464):
    (I + A) u = beta (v - exp(cum) k S),  A_ij = beta_i <k_i, exp(cum_i - cum_j) k_j>, i > j
so all that does not touch the state S is done for every chunk at once, and only two products a chunk follow one another.
Decays enter as exp(cum_i - cum_j), i >= j, which is <= 1: nothing overflows. Token i's results are made of tokens <= i alone.
Legend: R rows, T tokens, H value heads, Hk query and key heads, dk key and dv value head size, M chunks, C tokens of one
chunk, e decays of one token and head (1 or dk), A states asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgraft.ops.gated_delta.naive import channels, normalised, wide

# exp of it is nothing beside 1; below it, -inf among it, sums of decays would lose what follows
FLOOR = {torch.float32: -80.0, torch.float64: -600.0}
LEAF = 8  # positions of a chunk whose decays, one a channel, are taken pair by pair


@dataclass(frozen=True)
class Record:
    """What a pass leaves behind: enough for the state after any number of its tokens, without running anything again."""

    states: Tensor  # [R,M+1,H,dk,dv] before each chunk, and after the last
    keys: Tensor  # [R,M*C,H,dk] normalised; 0 behind T
    news: Tensor  # [R,M*C,H,dv] corrected values u; 0 behind T
    decay: Tensor  # [R,M*C,H] (GDN) or [R,M*C,H,dk] (KDA): log decays summed from the chunk's first token, inclusive
    chunk: int  # C

    def after(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The states [A,H,dk,dv] of rows [A] after the first counts [A] tokens, 0..T.

        exp(cum_a) S_chunk + sum over s <= a of exp(cum_a - cum_s) k_s u_s^T (targets.md 2.2).
        """
        chunks = self.states.shape[1] - 1
        index = counts // self.chunk
        state = self.states[rows, index]
        if chunks == 0:
            return state
        # a count at the very end has no chunk of its own: the last one's tokens, none of them taken
        place = rows * chunks + index.clamp_max(chunks - 1)
        many = counts - index * self.chunk
        keys, news, decay = (
            x.unflatten(1, (chunks, self.chunk)).flatten(0, 1).index_select(0, place)
            for x in (self.keys, self.news, channels(self.decay))
        )
        taken = (torch.arange(self.chunk, device=many.device) < many[:, None])[:, :, None, None]
        last = (many - 1).clamp_min(0)
        total = decay[torch.arange(len(last), device=last.device), last].where(many[:, None, None] > 0, 0)
        weight = (total[:, None] - decay).masked_fill(~taken, float("-inf")).exp()
        keys = (keys * weight).masked_fill(~taken, 0)  # and not 0 * inf, should a later token hold one
        product = keys.permute(0, 2, 3, 1) @ news.masked_fill(~taken, 0).transpose(1, 2)
        return state * total.exp()[..., None] + product


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Record]:
    """o [R,T,H,dv] in v's dtype, and the Record; arguments as `naive.recurrent_gated_delta`.

    chunk: C, at least 1; fewer where T is. Computed in float32 (float64 where v is float64). A log decay below FLOOR is taken
    as FLOOR. Memory besides the Record, in numbers a token and head: C for the pairs, and for KDA LEAF * dk.
    """
    dtype = wide(v)
    rows, tokens, heads, dv = v.shape
    dk = k.shape[-1]
    size = max(1, min(chunk, tokens))
    many = -(-tokens // size)

    def cut(x: Tensor) -> Tensor:  # [R,T,..] -> [R,M,C,..], zero behind T: such a token leaves the state alone
        padded = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, many * size - tokens))
        return padded.reshape(rows, many, size, *x.shape[2:])

    keys, queries = (normalised(cut(x)).repeat_interleave(heads // x.shape[2], dim=3) for x in (k, q))
    sums = cut(channels(g)).clamp_min(FLOOR[dtype]).cumsum(2)
    query, key, value, cum, rate = (inner(x) for x in (queries * dk**-0.5, keys, cut(v), sums, cut(beta)[..., None]))

    pairs = products(torch.stack([key, query], 3), key, cum)
    grown = cum.exp()
    solved = torch.linalg.solve_triangular(
        pairs[:, :, :, 0] * rate, torch.cat([value, key * grown], -1) * rate, upper=False, unitriangular=True
    )
    fresh, reads = solved[..., :dv], solved[..., dv:]
    ends = cum[..., -1:, :]
    writes, kept = (key * (ends - cum).exp()).mT, ends.exp().mT

    state = v.new_zeros(rows, heads, dk, dv, dtype=dtype) if initial is None else initial.to(dtype)
    states, news = [state], []
    for m in range(many):
        new = fresh[m] - reads[m] @ state
        state = state * kept[m] + writes[m] @ new
        states.append(state)
        news.append(new)
    before, new = torch.stack(states), torch.stack(news) if news else fresh
    out = (query * grown) @ before[:-1] + pairs[:, :, :, 1] @ new

    record = Record(before.transpose(0, 1), keys.flatten(1, 2), outer(new), sums.flatten(1, 2), size)
    if g.dim() == 3:
        record = Record(record.states, record.keys, record.news, record.decay[..., 0], size)
    return outer(out)[:, :tokens].to(v.dtype), record


def inner(x: Tensor) -> Tensor:
    """[R,M,C,H,..] -> [M,R,H,C,..], so that a chunk is one piece of memory."""
    return x.permute(1, 0, 3, 2, 4).contiguous()


def outer(x: Tensor) -> Tensor:
    """[M,R,H,C,d] -> [R,M*C,H,d]."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)


def products(left: Tensor, right: Tensor, cum: Tensor) -> Tensor:
    """sum over channels of left_i right_j exp(cum_i - cum_j) for i >= j, else 0.

    left [..,n,C,dk], right [..,C,dk], cum [..,C,e], never growing along C -> [..,n,C,C].
    """
    size = right.shape[-2]
    if cum.shape[-1] > 1:
        leaf = size
        while leaf > LEAF:
            leaf = -(-leaf // 2)
        whole = leaf
        while whole < size:
            whole *= 2
        if extra := whole - size:
            left, right = (F.pad(x, (0, 0, 0, extra)) for x in (left, right))
            cum = torch.cat([cum, cum[..., -1:, :].expand(*cum.shape[:-2], extra, -1)], -2)
        return halves(left, right, cum)[..., :size, :size]
    later = torch.ones(size, size, dtype=torch.bool, device=cum.device).triu(1)
    decay = (cum - cum.mT).masked_fill(later, float("-inf")).exp()
    return (left @ right.mT[..., None, :, :]) * decay[..., None, :, :]


def halves(left: Tensor, right: Tensor, cum: Tensor) -> Tensor:
    """`products` where every channel has its own decay: what the later half of a chunk reads of the earlier one is one matrix
    product, since both sides' decays are <= 1 when measured from the border; each half, by itself, is a chunk again."""
    size = right.shape[-2]
    if size <= LEAF:
        later = torch.ones(size, size, dtype=torch.bool, device=cum.device).triu(1)
        gap = (cum[..., :, None, :] - cum[..., None, :, :]).masked_fill(later[..., None], float("-inf"))
        return torch.einsum("...nid,...ijd->...nij", left, gap.exp() * right[..., None, :, :])
    half = size // 2
    border = cum[..., half - 1 : half, :]
    late = left[..., half:, :] * (cum[..., half:, :] - border).exp()[..., None, :, :]
    early = right[..., :half, :] * (border - cum[..., :half, :]).exp()
    across = late @ early.mT[..., None, :, :]
    two = left.unflatten(-2, (2, half)).transpose(-3, -4)
    own = halves(two, right.unflatten(-2, (2, half)), cum.unflatten(-2, (2, half)))
    top = F.pad(own[..., 0, :, :, :], (0, half))
    return torch.cat([top, torch.cat([across, own[..., 1, :, :, :]], -1)], -2)
