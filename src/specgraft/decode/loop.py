"""Speculative decoding in process: propose, verify, commit; many rows, each at its own length.

The committed text has the target's own law at every temperature (algorithms.md 2.11 and 4). Nothing committed is
computed twice: both caches move on by what a round commits, rejected entries are overwritten.
Legend: B rows, W width of a pass, N tokens of a pass, K taps, D hidden size, G draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specgraft.decode.pair import Pair, context_limit
from specgraft.decode.scheduler import Scheduler
from specgraft.decode.verify import commit, verify_greedy, verify_sampled
from specgraft.drafters.cache import DraftCache
from specgraft.drafters.precision import precision
from specgraft.drafters.walk import Proposal
from specgraft.ops.sampling import Law, distributions, draw
from specgraft.records import Verdict

GREEDY = Law()
clock = time.perf_counter  # benchmarks on a busy machine put CPU seconds in its place


@dataclass
class Request:
    """One prompt to be continued. `decode` fills what follows `uniform`."""

    ids: list[int]  # rendered prompt
    max_new_tokens: int
    law: Law = GREEDY
    uniform: torch.Tensor | None = None  # [uniform_count(..)] in [0,1), needed when the law samples
    output: list[int] = field(default_factory=list)  # the first token comes from prefill, the rest from rounds
    rounds: list[Verdict] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)  # logits [G] of each round; empty without a confidence head
    finish_reason: str = ""  # "stop" (end token kept) or "length"


@dataclass
class Timing:
    """Seconds spent by `decode`, summed over rounds; prefill is counted apart."""

    prefill: float = 0.0
    draft: float = 0.0  # block, walk, and context of new positions
    verify: float = 0.0  # the target's pass and its logits
    rest: float = 0.0  # accept rule and bookkeeping
    rounds: int = 0  # passes, whatever the number of rows
    passes: list[tuple[int, int, int, float]] = field(default_factory=list)  # rows, tokens verified, longest text, seconds


class Recorder(Protocol):
    """Is told what the passes of a decode gave (`distill.rollouts`). Tensors are the loop's own: read them, or copy what is kept."""

    def prompts(self, requests: Sequence[Request], taps: torch.Tensor) -> None:
        """Prefill of these requests: taps [b,W,K,D] of positions 0.., of which those of the prompt count."""

    def round(
        self, requests: Sequence[Request], anchors: torch.Tensor, drafts: torch.Tensor, taps: torch.Tensor, last: torch.Tensor
    ) -> None:
        """One round before its verdict: anchors [b] positions, drafts [b,G]; taps [b,G+1,K,D] and last [b,G+1,D] of x_a, d_1 .. d_G."""


def uniform_count(max_new_tokens: int, draft_tokens: int) -> int:
    """Numbers one sampled request can use: 1 for prefill; G drafts, G accept tests and 1 draw a round."""
    return 1 + max_new_tokens * (2 * draft_tokens + 1)


def decode(
    pair: Pair,
    requests: Sequence[Request],
    batch: int,
    progress: Callable[[int, int], None] | None = None,
    timing: Timing | None = None,
    scheduler: Scheduler | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Continues every request until an end token (kept) or its limit, `batch` rows at a time.

    Greedy output is the target's own; sampled output is drawn from the target's law and depends on the request's
    uniforms, not on the batch. `progress(finished, tokens)` is called after every round. The `scheduler` decides how many
    drafts are verified, all without one; that changes neither law, but which draw of the law a sampled request gets.
    Raises ValueError for a request that does not fit the target's context, or a scheduler that does not fit the drafter,
    or a `recorder` beside one: it is shown all drafts verified.
    """
    check_requests(pair, requests)
    if scheduler is not None and recorder is not None:
        raise ValueError("a recorder needs every draft verified: leave the scheduler out")
    if scheduler is not None:
        scheduler.check(pair.drafter)
    if requests:
        with torch.inference_mode():
            _Loop(pair, requests, min(batch, len(requests)), timing, scheduler, recorder).run(progress)


def check_requests(pair: Pair, requests: Sequence[Request]) -> None:
    """Raises ValueError naming the first request that cannot be served."""
    limit = context_limit(pair.target)
    for number, request in enumerate(requests):
        need = len(request.ids) + request.max_new_tokens
        if not request.ids:
            raise ValueError(f"request {number}: the prompt is empty; give at least one token")
        if request.max_new_tokens < 1:
            raise ValueError(f"request {number}: max_new_tokens is {request.max_new_tokens}; ask for at least 1")
        if limit and need > limit:
            raise ValueError(
                f"request {number}: prompt and answer may take {need} tokens, the target's context is {limit}: "
                "shorten the prompt or lower max_new_tokens"
            )
        if request.law.temperature > 0:
            count = uniform_count(request.max_new_tokens, pair.drafter.config.draft_tokens)
            if request.uniform is None or len(request.uniform) < count:
                raise ValueError(f"request {number}: temperature > 0 needs {count} uniforms (see `uniform_count`)")


@dataclass(frozen=True)
class _Seen:
    """What a pass of the target over N tokens gives."""

    logits: torch.Tensor  # [N, V]
    place: torch.Tensor  # [B, W] in 0..N-1: the anchor of each row and its drafts; the last one again behind them
    taps: torch.Tensor  # [B, W, K, D]
    last: torch.Tensor | None = None  # [B, W, D]; None where the pass was packed

    def distributions(self, laws: Sequence[Law], some: list[int]) -> torch.Tensor:
        """p [b,W,V] of these rows; laws [B] of all."""
        if self.place.numel() == len(self.logits):  # nothing is packed, nothing is copied
            logits = self.logits.view(*self.place.shape, -1)
            return distributions(logits[some] if len(some) < len(logits) else logits, [laws[number] for number in some])
        owner = torch.empty(len(self.logits), dtype=torch.long, device=self.place.device)
        owner[self.place] = torch.arange(len(self.place), device=self.place.device)[:, None]
        return distributions(self.logits, [laws[number] for number in owner.tolist()])[self.place[some]]


class _Loop:
    def __init__(
        self,
        pair: Pair,
        requests: Sequence[Request],
        batch: int,
        timing: Timing | None,
        scheduler: Scheduler | None,
        recorder: Recorder | None,
    ) -> None:
        self.pair, self.target, self.drafter = pair, pair.target, pair.drafter
        self.size = pair.drafter.config.draft_tokens
        self.taps = pair.drafter.config.taps
        self.device = pair.target.device
        self.batch, self.timing, self.scheduler, self.recorder = batch, timing, scheduler, recorder
        self.waiting = list(requests)[::-1]
        self.active: dict[int, Request] = {}
        longest = max(len(request.ids) for request in requests)
        slots = max(len(request.ids) + request.max_new_tokens for request in requests) + self.size + 1
        slots = max(slots, longest)
        self.cache = pair.target.cache(batch, slots)
        self.context = DraftCache(pair.drafter, pair.shared, batch, slots, pair.bias)
        self.finished = self.tokens = 0

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        while self.waiting or self.active:
            free = [row for row in range(self.batch) if row not in self.active]
            if self.waiting and (not self.active or len(free) >= min(len(self.waiting), max(1, self.batch // 8))):
                self._enter(free[: len(self.waiting)])
            else:
                self._round(sorted(self.active))
            if progress:
                progress(self.finished, self.tokens)

    def _clock(self) -> float:
        if self.timing is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return clock()

    def _enter(self, rows: list[int]) -> None:
        """Prefill: the taps of all prompt positions are the first context, the last position gives the first token."""
        began = self._clock()
        requests = [self.waiting.pop() for _ in rows]
        lengths = torch.tensor([len(request.ids) for request in requests])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for number, request in enumerate(requests):
            ids[number, : len(request.ids)] = torch.tensor(request.ids)
        index, lengths = torch.tensor(rows, device=self.device), lengths.to(self.device)
        self.cache.lengths[index] = 0
        step = self.target.forward(ids.to(self.device), self.cache, self.taps, rows=index)
        self.cache.lengths[index] = lengths
        self.context.reset(index)
        last = step.last[torch.arange(len(rows), device=self.device), lengths - 1]
        logits = self.target.logits(last)
        laws = [request.law for request in requests]
        first = logits.argmax(-1)
        sampled = [number for number, law in enumerate(laws) if law.temperature > 0]
        if sampled:
            some = torch.tensor(sampled, device=self.device)
            law = distributions(logits[some], [laws[number] for number in sampled])
            first[some] = draw(law, self._uniforms([requests[number] for number in sampled], 0, 1)[:, 0])
        assert step.taps is not None
        if self.recorder is not None:
            self.recorder.prompts(requests, step.taps)
        tokens = torch.cat([ids.to(self.device), torch.zeros_like(first)[:, None]], 1)
        tokens[torch.arange(len(rows), device=self.device), lengths] = first
        self.context.append(step.taps, tokens, lengths, index)
        for row, request, token in zip(rows, requests, first.tolist(), strict=True):
            self.active[row] = request
            request.output.append(token)
            self.tokens += 1
            if token in self.target.end_ids:
                self._leave(row, "stop")
            elif request.max_new_tokens == 1:
                self._leave(row, "length")
        if self.timing is not None:
            self.timing.prefill += self._clock() - began

    def _leave(self, row: int, reason: str) -> None:
        self.active.pop(row).finish_reason = reason
        self.finished += 1

    def _uniforms(self, requests: Sequence[Request], start: int, count: int) -> torch.Tensor:
        """[R, count] numbers of sampled requests, from `start` within the present round (prefill uses number 0)."""
        rows = []
        for request in requests:
            assert request.uniform is not None
            first = 1 + len(request.rounds) * (2 * self.size + 1) + start if request.output else 0
            rows.append(request.uniform[first : first + count])
        return torch.stack(rows).to(self.device)

    def _round(self, rows: list[int]) -> None:
        began = self._clock()
        requests = [self.active[row] for row in rows]
        laws = [request.law for request in requests]
        index = torch.tensor(rows, device=self.device)
        anchors = torch.tensor([request.output[-1] for request in requests], device=self.device)
        sampled = [number for number, law in enumerate(laws) if law.temperature > 0]
        draft_uniforms = torch.zeros(len(rows), self.size, dtype=torch.float64, device=self.device)
        if sampled:
            draft_uniforms[sampled] = self._uniforms([requests[number] for number in sampled], 0, self.size)
        with precision(self.drafter):
            proposal = self.drafter.draft(self.pair.shared, self.context, index, anchors, laws, draft_uniforms)
        lengths = self._lengths(proposal, index, requests)
        drafted = self._clock()
        ids = torch.cat([anchors[:, None], proposal.tokens], 1)
        seen = self._pass(ids, lengths, index)
        if self.recorder is not None:
            assert seen.last is not None
            self.recorder.round(requests, self.cache.lengths[index], proposal.tokens, seen.taps, seen.last)
        verified = self._clock()
        accepted, following = self._judge(seen, lengths, proposal, requests, laws, sampled)
        drafts = proposal.tokens.tolist()
        logs = proposal.confidence.tolist() if proposal.confidence is not None else []
        reasons = []
        for number, request in enumerate(requests):
            room = request.max_new_tokens - len(request.output)
            verified_drafts = drafts[number][: lengths[number]]
            verdict, reason = commit(verified_drafts, accepted[number], following[number], self.target.end_ids, room)
            request.rounds.append(verdict)
            if logs:
                request.confidence.append(logs[number])
            request.output += verdict.committed
            self.tokens += len(verdict.committed)
            reasons.append(reason)
        judged = self._clock()
        kept = torch.tensor(accepted, device=self.device) + 1  # x_a and the accepted drafts now have target states
        self.cache.lengths[index] += kept
        going = [number for number, reason in enumerate(reasons) if not reason]
        if going:
            some = torch.tensor(going, device=self.device)
            width = int(kept[some].max())
            tokens = torch.cat([ids[some], torch.zeros_like(anchors[some])[:, None]], 1)
            tokens.scatter_(1, kept[some][:, None], torch.tensor(following, device=self.device)[some][:, None])
            self.context.append(seen.taps[some, :width], tokens[:, : width + 1], kept[some], index[some])
        for row, reason in zip(rows, reasons, strict=True):
            if reason:
                self._leave(row, reason)
        if self.timing is not None:
            self.timing.draft += drafted - began + self._clock() - judged
            self.timing.verify += verified - drafted
            self.timing.rest += judged - verified
            self.timing.rounds += 1
            reach = int((self.context.lengths[index] if going else self.cache.lengths[index]).max())
            self.timing.passes.append((len(rows), len(rows) + sum(lengths), reach, self._clock() - began))

    def _lengths(self, proposal: Proposal, index: torch.Tensor, requests: list[Request]) -> list[int]:
        """Drafts of each row that are verified. No row needs more than it may still commit, less the token behind them."""
        if self.scheduler is None:
            return [self.size] * len(requests)
        assert proposal.confidence is not None
        room = [request.max_new_tokens - len(request.output) for request in requests]
        reach = int(self.cache.lengths[index].max())
        laws = [request.law for request in requests]
        return self.scheduler.lengths(proposal.confidence, laws, room, reach, [id(request) for request in requests])

    def _pass(self, ids: torch.Tensor, lengths: list[int], index: torch.Tensor) -> _Seen:
        """The target over the anchor and the first lengths[b] drafts of each row, ids [B,G+1]. Rows of unlike lengths are packed:
        only these tokens are computed."""
        width, rows = 1 + max(lengths), len(lengths)
        if min(lengths) + 1 == width:
            step = self.target.forward(ids[:, :width], self.cache, self.taps, rows=None if rows == self.batch else index)
            assert step.taps is not None
            place = torch.arange(rows * width, device=self.device).view(rows, width)
            return _Seen(self.target.logits(step.last).flatten(0, 1), place, step.taps, step.last)
        counts = torch.tensor(lengths, device=self.device) + 1
        slot = torch.arange(width, device=self.device)
        place = (counts.cumsum(0) - counts)[:, None] + torch.minimum(slot, counts[:, None] - 1)
        packed = ids[:, :width][slot < counts[:, None]]
        step = self.target.forward_packed(packed, counts, self.cache, self.taps, index)
        assert step.taps is not None
        return _Seen(self.target.logits(step.last[0]), place, step.taps[0][place])

    def _judge(
        self,
        seen: _Seen,
        lengths: list[int],
        proposal: Proposal,
        requests: list[Request],
        laws: list[Law],
        sampled: list[int],
    ) -> tuple[list[int], list[int]]:
        """Accepted drafts and the token behind them, a row at its own temperature."""
        verified = torch.tensor(lengths, device=self.device)
        accepted, following = verify_greedy(seen.logits.argmax(-1)[seen.place], proposal.tokens, verified)
        if sampled:
            some = torch.tensor(sampled, device=self.device)
            assert proposal.q is not None
            p = seen.distributions(laws, sampled)
            level = self._uniforms([requests[number] for number in sampled], self.size, self.size + 1)
            accepted[some], following[some] = verify_sampled(
                p, proposal.q[some], proposal.tokens[some], level[:, :-1], level[:, -1], verified[some]
            )
        return accepted.tolist(), following.tolist()
