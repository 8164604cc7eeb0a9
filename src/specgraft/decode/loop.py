"""Speculative decoding in process: propose, verify, commit; many rows, each at its own length.

The committed text has the target's own law at every temperature (algorithms.md 2.11 and 4). Nothing committed is
computed twice: both caches move on by what a round commits, rejected entries are overwritten.
Legend: B rows, W width of a pass, N tokens of a pass, K taps, D hidden size, G draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specgraft.decode.judge import Seen, judge
from specgraft.decode.pair import Pair
from specgraft.decode.requests import Recorder as Recorder
from specgraft.decode.requests import Request as Request
from specgraft.decode.requests import Timing as Timing
from specgraft.decode.requests import check_requests as check_requests
from specgraft.decode.requests import uniform_count as uniform_count
from specgraft.decode.scheduler import Scheduler
from specgraft.decode.verify import commit
from specgraft.drafters.cache import DraftCache
from specgraft.drafters.precision import precision
from specgraft.drafters.walk import Proposal
from specgraft.ops.sampling import distributions, draw
from specgraft.targets.generate import prefill

clock = time.perf_counter  # benchmarks on a busy machine put CPU seconds in its place
# whether a round is drafted before the round before it is read; None: where the device works while Python goes on
AHEAD: bool | None = None


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


@dataclass(frozen=True)
class _Lead:
    """A round's drafts, launched before the round before it was read."""

    rows: list[int]
    anchors: torch.Tensor  # [B]
    proposal: Proposal

    def of(self, rows: list[int]) -> _Lead | None:
        """That of these rows; None where one of them is new."""
        if rows == self.rows:
            return self
        if not set(rows) <= set(self.rows):
            return None
        some = [self.rows.index(row) for row in rows]
        index, p = torch.tensor(some, device=self.anchors.device), self.proposal
        q, sure = (None if x is None else x[index] for x in (p.q, p.confidence))
        return _Lead(rows, self.anchors[index], Proposal(p.tokens[index], q, sure))


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
        slots = max(len(request.ids) + request.max_new_tokens for request in requests) + self.size + 1
        self.cache = pair.target.cache(batch, slots)
        self.context = DraftCache(pair.drafter, pair.shared, batch, slots, pair.bias)
        self.finished = self.tokens = 0
        wanted = self.device.type != "cpu" if AHEAD is None else AHEAD
        self.ahead = wanted and scheduler is None and recorder is None  # those must read a round before the next is drafted
        self.lead: _Lead | None = None

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
        requests, self.lead = [self.waiting.pop() for _ in rows], None  # drafts of the rows' old texts are nobody's
        index = torch.tensor(rows, device=self.device)
        last, taps = prefill(self.target, self.cache, index, [request.ids for request in requests], self.taps)
        self.context.reset(index)
        logits = self.target.logits(last)
        laws = [request.law for request in requests]
        first = logits.argmax(-1)
        sampled = [number for number, law in enumerate(laws) if law.temperature > 0]
        if sampled:
            some = torch.tensor(sampled, device=self.device)
            law = distributions(logits[some], [laws[number] for number in sampled])
            first[some] = draw(law, self._uniforms([requests[number] for number in sampled], 0, 1)[:, 0])
        assert taps is not None
        if self.recorder is not None:
            self.recorder.prompts(requests, taps)
        started, lengths = first.tolist(), [len(request.ids) for request in requests]
        tokens = torch.zeros(len(rows), taps.shape[1] + 1, dtype=torch.long)
        for number, request in enumerate(requests):
            tokens[number, : lengths[number] + 1] = torch.tensor([*request.ids, started[number]])
        self.context.bound = None
        self.context.append(taps, tokens.to(self.device), torch.tensor(lengths, device=self.device), index)
        for row, request, token in zip(rows, requests, started, strict=True):
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

    def _uniforms(self, requests: Sequence[Request], start: int, count: int, behind: int = 0) -> torch.Tensor:
        """[R, count] numbers of sampled requests, from `start` within the present round, or one `behind` it (prefill uses number 0)."""
        rows = []
        for request in requests:
            assert request.uniform is not None
            first = 1 + (len(request.rounds) + behind) * (2 * self.size + 1) + start if request.output else 0
            rows.append(request.uniform[first : first + count])
        return torch.stack(rows).to(self.device)

    def _propose(
        self, requests: Sequence[Request], index: torch.Tensor, anchors: torch.Tensor, behind: int, bound: int | None
    ) -> Proposal:
        """Drafts of the present round, or of the one `behind` it; no context is longer than `bound`, where that is known."""
        laws = [request.law for request in requests]
        sampled = [number for number, law in enumerate(laws) if law.temperature > 0]
        uniforms = None
        if sampled:
            uniforms = torch.zeros(len(requests), self.size, dtype=torch.float64, device=self.device)
            uniforms[sampled] = self._uniforms([requests[number] for number in sampled], 0, self.size, behind)
        self.context.bound = bound
        with precision(self.drafter):
            return self.drafter.draft(self.pair.shared, self.context, index, anchors, laws, uniforms)

    def _round(self, rows: list[int]) -> None:
        began = self._clock()
        requests = [self.active[row] for row in rows]
        laws = [request.law for request in requests]
        sampled = [number for number, law in enumerate(laws) if law.temperature > 0]
        index = torch.tensor(rows, device=self.device)
        # places that a row holds after this round, at the most: known here, so that no device is asked
        reach = max(len(request.ids) + len(request.output) for request in requests) + self.size if self.ahead else None
        lead = self.lead.of(rows) if self.lead is not None else None
        if lead is None:
            anchors = torch.tensor([request.output[-1] for request in requests], device=self.device)
            lead = _Lead(rows, anchors, self._propose(requests, index, anchors, 0, reach))
        anchors, proposal = lead.anchors, lead.proposal
        lengths = self._lengths(proposal, index, requests)
        drafted = self._clock()
        ids = torch.cat([anchors[:, None], proposal.tokens], 1)
        seen = self._pass(ids, lengths, index, reach)
        if self.recorder is not None:
            assert seen.last is not None
            self.recorder.round(requests, self.cache.lengths[index], proposal.tokens, seen.taps, seen.last)
        verified = self._clock()
        level = self._uniforms([requests[number] for number in sampled], self.size, self.size + 1) if sampled else None
        accepted, following = judge(seen, lengths, proposal, laws, sampled, level)
        judged = self._clock()
        self.cache.lengths[index] += accepted + 1  # x_a and the accepted drafts now have target states
        if self.ahead:  # also for rows that prove to have ended: what they hold is given up
            self._inject(seen.taps, ids, accepted, following, index, reach)
            self.lead = _Lead(rows, following, self._propose(requests, index, following, 1, reach))
        launched = self._clock()
        told = torch.cat([accepted[:, None], following[:, None], proposal.tokens], 1).tolist()  # the device is waited for here
        logs = proposal.confidence.tolist() if proposal.confidence is not None else []
        reasons = []
        for number, request in enumerate(requests):
            taken, token, *drafts = told[number]
            room = request.max_new_tokens - len(request.output)
            verdict, reason = commit(drafts[: lengths[number]], taken, token, self.target.end_ids, room)
            request.rounds.append(verdict)
            if logs:
                request.confidence.append(logs[number])
            request.output += verdict.committed
            self.tokens += len(verdict.committed)
            reasons.append(reason)
        read = self._clock()
        going = [number for number, reason in enumerate(reasons) if not reason]
        if going and not self.ahead:
            width = max(told[number][0] for number in going) + 1
            some = slice(None) if len(going) == len(rows) else torch.tensor(going, device=self.device)
            self._inject(seen.taps[some, :width], ids[some, :width], accepted[some], following[some], index[some], None)
        for row, reason in zip(rows, reasons, strict=True):
            if reason:
                self._leave(row, reason)
        if self.timing is not None:
            ended = self._clock()
            spent = launched - judged + ended - read
            self.timing.draft += drafted - began + spent
            self.timing.commit += spent
            self.timing.verify += verified - drafted
            self.timing.accept += judged - verified
            self.timing.rest += judged - verified + read - launched
            self.timing.rounds += 1
            longest = max(len(request.ids) + len(request.output) - 1 for request in requests)
            self.timing.passes.append((len(rows), len(rows) + sum(lengths), longest, ended - began))

    def _inject(
        self, taps: torch.Tensor, ids: torch.Tensor, accepted: torch.Tensor, following: torch.Tensor, index: torch.Tensor, bound: int | None
    ) -> None:
        """Commits to the drafter: of taps [b,W,K,D] and ids [b,W] the anchor and the accepted drafts, and the token behind them."""
        kept = accepted + 1
        tokens = torch.cat([ids, ids[:, :1]], 1).scatter_(1, kept[:, None], following[:, None])
        self.context.bound = bound
        self.context.append(taps, tokens, kept, index)

    def _lengths(self, proposal: Proposal, index: torch.Tensor, requests: list[Request]) -> list[int]:
        """Drafts of each row that are verified. No row needs more than it may still commit, less the token behind them."""
        if self.scheduler is None:
            return [self.size] * len(requests)
        assert proposal.confidence is not None
        room = [request.max_new_tokens - len(request.output) for request in requests]
        reach = int(self.cache.lengths[index].max())
        laws = [request.law for request in requests]
        return self.scheduler.lengths(proposal.confidence, laws, room, reach, [id(request) for request in requests])

    def _pass(self, ids: torch.Tensor, lengths: list[int], index: torch.Tensor, reach: int | None) -> Seen:
        """The target over the anchor and the first lengths[b] drafts of each row, ids [B,G+1]. Rows of unlike lengths are packed:
        only these tokens are computed."""
        width, rows = 1 + max(lengths), len(lengths)
        if min(lengths) + 1 == width:
            some = None if rows == self.batch else index
            step = self.target.forward(ids[:, :width], self.cache, self.taps, some, reach)
            assert step.taps is not None
            place = torch.arange(rows * width, device=self.device).view(rows, width)
            return Seen(self.target.logits(step.last).flatten(0, 1), place, step.taps, step.last)
        counts = torch.tensor(lengths, device=self.device) + 1
        slot = torch.arange(width, device=self.device)
        place = (counts.cumsum(0) - counts)[:, None] + torch.minimum(slot, counts[:, None] - 1)
        packed = ids[:, :width][slot < counts[:, None]]
        step = self.target.forward_packed(packed, counts, self.cache, self.taps, index)
        assert step.taps is not None
        return Seen(self.target.logits(step.last[0]), place, step.taps[0][place])
