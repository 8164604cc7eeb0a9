"""The gated delta rule, C tokens at a time, and the state after any of them.

Within a chunk the corrected values u solve a unit triangular system (the "UT transform" of arXiv 2412.06464):
    (I + A) u = beta (v - exp(cum) k S),  A_ij = beta_i <k_i, exp(cum_i - cum_j) k_j>, i > j
so all that does not touch the state S is done for every chunk at once, and only two products a chunk follow one another.
Decays enter as exp(cum_i - cum_j), i >= j, which is <= 1: nothing overflows. Such differences are taken in float64, or added
up without subtracting: float32 sums made states of size 4 wrong by 4e-5 where decays were strong. Token i's results are made
of tokens <= i alone.
Legend: R rows, T tokens, H value heads, Hk query and key heads, dk key and dv value head size, M chunks, C tokens of one
chunk, e decays of one token and head (1 or dk), A states asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgraft.ops.gated_delta.naive import channels, normalised, wide

FLOOR = -600.0  # of a log decay: exp of it is nothing, and unlike -inf it may be subtracted from itself


@dataclass(frozen=True)
class Record:
    """What a pass leaves behind: enough for the state after any number of its tokens, without running anything again."""

    states: Tensor  # [R,M+1,H,dk,dv] before each chunk, and after the last
    keys: Tensor  # [R,M*C,H,dk] normalised; 0 behind T
    news: Tensor  # [R,M*C,H,dv] corrected values u; 0 behind T
    decay: Tensor  # [R,M*C,H] (GDN) or [R,M*C,H,dk] (KDA), float64: log decays summed from the chunk's start
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
        last = (many - 1).clamp_min(0)[:, None, None, None].expand(-1, *decay.shape[1:2], 1, decay.shape[-1])
        total = decay.gather(2, last).masked_fill((many == 0)[:, None, None, None], 0)
        weight = (total - decay).masked_fill(later, float("-inf")).to(state.dtype).exp()
        # zeros, not just zero weights: 0 * inf is no 0, should a later token hold one
        keys, news = keys.masked_fill_(later, 0), news.masked_fill_(later, 0)
        start = (state * total.to(state.dtype).exp().mT).flatten(0, 1)
        return torch.baddbmm(start, (keys * weight).mT.flatten(0, 1), news.flatten(0, 1)).view_as(state)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Record]:
    """o [R,T,H,dv] in v's dtype, and the Record; arguments as `naive.recurrent_gated_delta`.

    chunk: C, at least 1; fewer where T is. Computed in float32 (float64 where v is float64). A token that is not finite spoils
    o of its whole chunk, but no state before it and no other row; a log decay of -inf is finite here. Memory besides the
    Record: a few times q, k and v, and 4 * C numbers a token and head.
    """
    parts = pieces(q, k, v, g, beta, chunk)
    state = start(k, v, initial).flatten(0, 1)
    states, news = [state], []
    for fresh, reads, writes, kept in zip(parts.fresh, parts.reads, parts.writes, parts.kept, strict=True):
        news.append(torch.baddbmm(fresh, reads, state, alpha=-1))
        state = torch.baddbmm(state * kept, writes, news[-1])
        states.append(state)
    before, new = torch.stack(states), torch.stack(news) if news else parts.fresh
    out = torch.baddbmm(
        (parts.queries @ before[:-1]).flatten(0, 1), parts.within.flatten(0, 1), new.flatten(0, 1)
    ).view_as(new)
    return outer(out, len(v))[:, : v.shape[1]].to(v.dtype), parts.record(before, new, g)


def start(k: Tensor, v: Tensor, initial: Tensor | None) -> Tensor:
    """The state before the first token, [R,H,dk,dv]."""
    if initial is None:
        return k.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=wide(v))
    return initial.to(wide(v))


@dataclass(frozen=True)
class Pieces:
    """The chunks of a text, as far as they do not depend on the state before them. [M,R*H,..] but for the first two."""

    keys: Tensor  # [R,M,C,Hk,dk] normalised
    sums: Tensor  # [R,M,C,H,e] log decays, summed, float64
    fresh: Tensor  # [..,C,dv] corrected values if the state were 0
    reads: Tensor  # [..,C,dk] what a state takes from them
    writes: Tensor  # [..,dk,C] keys, decayed to the chunk's end
    kept: Tensor  # [..,e,1] of the state, from the chunk's start to its end
    queries: Tensor  # [..,C,dk] decayed from the chunk's start
    within: Tensor  # [..,C,C] what tokens read of each other's corrected values

    def record(self, states: Tensor, news: Tensor, g: Tensor) -> Record:
        """Of states [M+1,R*H,dk,dv] and corrected values [M,R*H,C,dv]; g for its shape."""
        rows, _, size, heads, _ = self.sums.shape
        sums = self.sums.flatten(1, 2)
        return Record(
            states=states.unflatten(1, (rows, heads)).transpose(0, 1),
            keys=spread(self.keys, heads).flatten(1, 2),
            news=outer(news, rows),
            decay=sums if g.dim() == 4 else sums[..., 0],
            chunk=size,
        )


def pieces(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Pieces:
    """Arguments as `gated_delta`."""
    if chunk < 1:
        raise ValueError(f"gated delta rule: chunks of {chunk} tokens")
    dtype = wide(v)
    rows, tokens, heads, dv = v.shape
    size = max(1, min(chunk, tokens))
    many = -(-tokens // size)

    def cut(x: Tensor) -> Tensor:  # [R,T,..] -> [R,M,C,..], zero behind T: such a token leaves the state alone
        padded = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, many * size - tokens))
        return padded.reshape(rows, many, size, *x.shape[2:])

    keys, queries = normalised(cut(k)), normalised(cut(q)) * q.shape[-1] ** -0.5
    decay = cut(channels(g)).clamp_min(FLOOR)
    sums = decay.cumsum(2, dtype=torch.float64)
    key, query, value = inner(keys, heads), inner(queries, heads), inner(cut(v), heads)
    rate = inner(cut(beta)[..., None], heads)
    if g.dim() == 3:  # products of keys and queries that heads share are made once
        few = inner(keys, keys.shape[3])
        pairs, since, until = products(
            torch.cat([few, inner(queries, keys.shape[3])], -2), few, inner(sums, heads), dtype
        )
    else:
        pairs, since, until = products_by_channel(torch.stack([key, query], 2), key, inner(decay, heads))
    grown = since.exp()
    # transposed and from the right: the same substitution, without a copy into column-major
    solved = torch.linalg.solve_triangular(
        (pairs[:, :, 0] * rate).mT,
        torch.cat([value * rate, key * (grown * rate)], -1).mT,
        upper=True,
        left=False,
        unitriangular=True,
    ).mT
    return Pieces(
        keys=keys,
        sums=sums,
        fresh=solved[..., :dv],
        reads=solved[..., dv:],
        writes=(key * until.exp()).mT,
        kept=grown[..., -1:, :].mT,
        queries=query * grown,
        within=pairs[:, :, 1],
    )


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


def products(left: Tensor, right: Tensor, sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """<left_i, right_j> times the decay from j to i, for i >= j, else 0: one decay for all channels.

    left [M,b,n*C,dk], right [M,b,C,dk], sums [M,B,C,1] of log decays, float64, B a multiple of b -> [M,B,n,C,C]; the log decays
    from the chunk's start to i and from i to its end, [M,B,C,1], in `dtype`.
    """
    size = right.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu(1)
    decay = (sums - sums.mT).to(dtype).masked_fill(later, float("-inf")).exp()
    plain = (left @ right.mT).unflatten(2, (left.shape[2] // size, size))
    shared = sums.shape[1] // plain.shape[1]
    pairs = plain[:, :, None] * decay.unflatten(1, (plain.shape[1], shared))[:, :, :, None]
    return pairs.flatten(1, 2), sums.to(dtype), (sums[..., -1:, :] - sums).to(dtype)


def products_by_channel(left: Tensor, right: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum over channels of left_i right_j times the decay from j to i, for i >= j, else 0: each channel has its own.

    left [..,n,C,dk], right and log decays [..,C,dk] -> [..,n,C,C]; the log decays from the chunk's start to i and from i to its
    end, [..,C,dk].
    What the later half of a chunk reads of the earlier one is one matrix product, since the decays of both sides, taken from
    the border, are <= 1; each half by itself is a chunk again. Sums are those of the halves, added up.
    """
    size = right.shape[-2]
    if size == 1:
        return (left * right[..., None, :, :]).sum(-1, keepdim=True), decay, torch.zeros_like(decay)
    half = -(-size // 2)
    if size % 2:  # one more that decays no further, dropped again below
        left, right, decay = (F.pad(x, (0, 0, 0, 1)) for x in (left, right, decay))
    two = (x.unflatten(-2, (2, half)) for x in (left, right, decay))
    own, since, until = products_by_channel(next(two).transpose(-3, -4), *two)
    late = left[..., half:, :] * since[..., 1, :, :].exp()[..., None, :, :]
    early = right[..., :half, :] * until[..., 0, :, :].exp()
    across = (late.flatten(-3, -2) @ early.mT).unflatten(-2, (-1, half))
    upper = F.pad(own[..., 0, :, :, :], (0, half))
    pairs = torch.cat([upper, torch.cat([across, own[..., 1, :, :, :]], -1)], -2)
    first, second = since[..., -1:, :].unbind(-3)
    since = torch.cat([since[..., 0, :, :], since[..., 1, :, :] + first], -2)
    until = torch.cat([until[..., 0, :, :] + second, until[..., 1, :, :]], -2)
    return pairs[..., :size, :size], since[..., :size, :], until[..., :size, :]
