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
            x.unflatten(1, (chunks, self.chunk)).flatten(0, 1).transpose(1, 2).index_select(0, place)
            for x in (self.keys, self.news, channels(self.decay))
        )  # [A,H,C,..]
        later = (torch.arange(self.chunk, device=many.device) >= many[:, None])[:, None, :, None]
        last = (many - 1).clamp_min(0)
        total = decay[torch.arange(len(last), device=last.device), :, last].where(many[:, None, None] > 0, 0)[:, :, None]
        weight = (total - decay).masked_fill(later, float("-inf")).exp()
        # zeros, not just zero weights: 0 * inf is no 0, should a later token hold one
        keys, news = keys.masked_fill_(later, 0), news.masked_fill_(later, 0)
        start = (state * total.exp().mT).flatten(0, 1)
        return torch.baddbmm(start, (keys * weight).mT.flatten(0, 1), news.flatten(0, 1)).view_as(state)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Record]:
    """o [R,T,H,dv] in v's dtype, and the Record; arguments as `naive.recurrent_gated_delta`.

    chunk: C, at least 1; fewer where T is. Computed in float32 (float64 where v is float64). A log decay below FLOOR is taken
    as FLOOR. Memory besides the Record: a few times q, k and v, and 4 * C numbers a token and head.
    """
    if chunk < 1:
        raise ValueError(f"gated delta rule: chunks of {chunk} tokens")
    dtype = wide(v)
    rows, tokens, heads, dv = v.shape
    size = max(1, min(chunk, tokens))
    many = -(-tokens // size)

    def cut(x: Tensor) -> Tensor:  # [R,T,..] -> [R,M,C,..], zero behind T: such a token leaves the state alone
        padded = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, many * size - tokens))
        return padded.reshape(rows, many, size, *x.shape[2:])

    keys, sums = normalised(cut(k)), cut(channels(g)).clamp_min(FLOOR[dtype]).cumsum(2)
    queries = normalised(cut(q)) * q.shape[-1] ** -0.5
    key, query, cum = inner(keys, heads), inner(queries, heads), inner(sums, heads)
    value, rate = inner(cut(v), heads), inner(cut(beta)[..., None], heads)

    if cum.shape[-1] == 1:  # products of keys and queries that heads share are made once
        few = inner(keys, keys.shape[3])
        pairs = products(torch.cat([few, inner(queries, keys.shape[3])], -2), few, cum)
    else:
        pairs = products_by_channel(torch.stack([key, query], 2), key, cum)
    grown, ends = cum.exp(), cum[..., -1:, :]
    # transposed and from the right: the same substitution, without a copy into column-major
    solved = torch.linalg.solve_triangular(
        (pairs[:, :, 0] * rate).mT,
        torch.cat([value * rate, key * (grown * rate)], -1).mT,
        upper=True,
        left=False,
        unitriangular=True,
    ).mT
    fresh, reads = solved[..., :dv], solved[..., dv:]
    writes, kept = (key * (ends - cum).exp()).mT, ends.exp().mT

    state = key.new_zeros(rows * heads, key.shape[-1], dv) if initial is None else initial.to(dtype).flatten(0, 1)
    states, news = [state], []
    for m in range(many):
        news.append(torch.baddbmm(fresh[m], reads[m], state, alpha=-1))
        state = torch.baddbmm(state * kept[m], writes[m], news[-1])
        states.append(state)
    before, new = torch.stack(states), torch.stack(news) if news else fresh
    out = torch.baddbmm(
        ((query * grown) @ before[:-1]).flatten(0, 1), pairs[:, :, 1].flatten(0, 1), new.flatten(0, 1)
    ).view_as(new)

    record = Record(
        states=before.unflatten(1, (rows, heads)).transpose(0, 1),
        keys=spread(keys, heads).flatten(1, 2),
        news=outer(new, rows),
        decay=sums.flatten(1, 2).view(rows, many * size, *g.shape[2:]),
        chunk=size,
    )
    return outer(out, rows)[:, :tokens].to(v.dtype), record


def spread(x: Tensor, heads: int) -> Tensor:
    """[R,M,C,h,d] -> [R,M,C,H,d]: each head for H / h of them, one after the other."""
    return x.unsqueeze(4).expand(*x.shape[:4], heads // x.shape[3], x.shape[4]).flatten(3, 4)


def inner(x: Tensor, heads: int) -> Tensor:
    """[R,M,C,h,d] -> [M,R*H,C,d], heads as `spread`; a chunk is one piece of memory."""
    x = x.unsqueeze(4).expand(*x.shape[:4], heads // x.shape[3], x.shape[4])
    return x.permute(1, 0, 3, 4, 2, 5).flatten(1, 3)


def outer(x: Tensor, rows: int) -> Tensor:
    """[M,R*H,C,d] -> [R,M*C,H,d]."""
    return x.unflatten(1, (rows, x.shape[1] // rows)).permute(1, 0, 3, 2, 4).flatten(1, 2)


def products(left: Tensor, right: Tensor, cum: Tensor) -> Tensor:
    """<left_i, right_j> exp(cum_i - cum_j) for i >= j, else 0: one decay for all channels.

    left [M,b,n*C,dk], right [M,b,C,dk], cum [M,B,C,1], never growing along C, B a multiple of b -> [M,B,n,C,C].
    """
    size = right.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=cum.device).triu(1)
    decay = (cum - cum.mT).masked_fill(later, float("-inf")).exp()
    plain = (left @ right.mT).unflatten(2, (left.shape[2] // size, size))
    shared = cum.shape[1] // plain.shape[1]
    return (plain[:, :, None] * decay.unflatten(1, (plain.shape[1], shared))[:, :, :, None]).flatten(1, 2)


def products_by_channel(left: Tensor, right: Tensor, cum: Tensor) -> Tensor:
    """sum over channels of left_i right_j exp(cum_i - cum_j) for i >= j, else 0: a decay for every channel.

    left [..,n,C,dk], right and cum [..,C,dk], cum never growing along C -> [..,n,C,C].
    What the later half of a chunk reads of the earlier one is one matrix product, since the decays of both sides, taken from
    the border, are <= 1; each half by itself is a chunk again.
    """
    size = right.shape[-2]
    if size == 1:
        return (left * right[..., None, :, :]).sum(-1, keepdim=True)
    half = -(-size // 2)
    if size % 2:  # one more that decays no further, dropped again below
        left, right = (F.pad(x, (0, 0, 0, 1)) for x in (left, right))
        cum = torch.cat([cum, cum[..., -1:, :]], -2)
    border = cum[..., half - 1 : half, :]
    late = left[..., half:, :] * (cum[..., half:, :] - border).exp()[..., None, :, :]
    early = right[..., :half, :] * (border - cum[..., :half, :]).exp()
    across = (late.flatten(-3, -2) @ early.mT).unflatten(-2, (-1, half))
    halves = (x.unflatten(-2, (2, half)) for x in (left, right, cum))
    own = products_by_channel(next(halves).transpose(-3, -4), *halves)
    upper = F.pad(own[..., 0, :, :, :], (0, half))
    return torch.cat([upper, torch.cat([across, own[..., 1, :, :, :]], -1)], -2)[..., :size, :size]
