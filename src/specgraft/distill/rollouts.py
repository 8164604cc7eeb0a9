"""Draft-verify rounds of the present drafter on a batch's prompts, and what is learnt from each slot of theirs.

Real decoding at temperature 0 (`decode.loop`), so the text is the target's own. The verify passes have computed the target's
states behind every draft, refused ones included, and the taps of every position that was committed: they are kept, and
nothing is computed twice.
Legend: B texts, T tokens of all texts, M rounds of all texts, W width of a pass, G draft tokens, K taps, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from specgraft.decode.loop import Request, Timing, decode
from specgraft.decode.pair import Pair
from specgraft.distill.batch import Batch, Blocks
from specgraft.drafters.drafter import Texts
from specgraft.drafters.markov import BiasRows
from specgraft.drafters.precision import at_precision


@dataclass(frozen=True)
class Rollouts:
    """The rounds of a batch, text after text, and within a text in their order. Filled by `roll_out`."""

    texts: Texts  # one row [1,T]: every text but its last token, which has no state and which no block reads
    answers: list[list[int]]  # what was decoded behind each prompt
    anchors: torch.Tensor  # [M] places in the row, ascending
    tokens: torch.Tensor  # [M, G+1] x_a, d_1 .. d_G
    states: torch.Tensor  # [M, G, D] outputs of the target's last layer at x_a, d_1 .. d_{G-1}: state j-1 gives p_j
    accepted: torch.Tensor  # [M] r
    committed: torch.Tensor  # [M] tokens added to the text: r+1, or r in a round that an end token or the limit has cut
    following: torch.Tensor  # [M] the last of these

    def blocks(self, mask: torch.Tensor) -> Blocks:
        """The rounds' blocks with the slots of mask [M,G], each behind the drafts before it; one row of M blocks."""
        places = torch.arange(mask.numel(), device=mask.device).view(1, *mask.shape)
        return Blocks(mask[None], self.tokens[None], self.states.flatten(0, 1), places)

    def text_tokens(self) -> torch.Tensor:
        """[M,G] the drafts, and in place of the first refused one what the target said there."""
        return self.tokens[:, 1:].where(~_first(self.accepted, self.tokens.shape[1] - 1), self.following[:, None])


def roll_out(
    both: Pair, batch: Batch, timing: Timing | None = None, limit: int = 0, compute: torch.dtype = torch.float32
) -> Rollouts:
    """Decodes the prompts of the batch, all together, each as far as its reference answer goes (or `limit` > 0 tokens).

    The drafter is taken as it is now, and drafts with products in a half-precision `compute`, as it is trained. Raises
    ValueError for a batch without a loss mask, or without an answer.
    """
    requests = prompts_of(batch, limit)
    recording = Recording(requests, both.drafter.config.draft_tokens)
    decode(as_now(both, compute), requests, len(requests), timing=timing, recorder=recording)
    return recording.rollouts(requests)


def as_now(both: Pair, compute: torch.dtype) -> Pair:
    """The pair with the drafter's present weights, whatever was remembered of earlier ones."""
    drafter = both.drafter
    if compute in (torch.bfloat16, torch.float16) and drafter.fc.weight.dtype == torch.float32:
        drafter = at_precision(copy.deepcopy(drafter).requires_grad_(False), compute)
    # a step may change weights where the memory of bias rows does not see it
    return replace(both, drafter=drafter, bias=None if drafter.markov_head is None else BiasRows(drafter.markov_head))


def streams(
    accepted: torch.Tensor, committed: torch.Tensor, drafts: torch.Tensor, end_ids: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [M,G] of the response and of the rejected stream (2605.29343; algorithms.md 3.9).

    Response: the tokens that the round committed, the target's correction included. Rejected: drafts that the target has
    refused, that is from the first one on; none in a round that an end token or the limit has cut, as those behind were
    neither accepted nor refused, and none behind an end token that was drafted.
    """
    slot = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    refused = (slot > accepted[:, None]) & (committed > accepted)[:, None]
    ends = refused & torch.isin(drafts, torch.tensor(sorted(end_ids), dtype=drafts.dtype, device=drafts.device))
    return slot <= committed[:, None], refused & (ends.long().cumsum(1) - ends.long() == 0)


def prompts_of(batch: Batch, limit: int = 0) -> list[Request]:
    """One request a document: what lies before its first supervised token, to be continued by as many as follow in a run."""
    if batch.loss_mask is None:
        raise ValueError("rollouts need the loss mask of the batch: fill Batch.loss_mask")
    requests = []
    starts, masks = batch.texts.starts.tolist(), batch.loss_mask.tolist()
    for ids, first, mask in zip(batch.texts.input_ids.tolist(), starts, masks, strict=True):
        done = -1  # start of the document that has its request
        for place, supervised in enumerate(mask):
            if not supervised or first[place] == done:
                continue
            done, stop = first[place], place
            while stop < len(ids) and mask[stop] and first[stop] == done:
                stop += 1
            count = stop - place
            requests.append(Request(ids[done:place], min(count, limit) if limit else count))
    if not requests:
        raise ValueError("no row of the batch has an answer: nothing can be decoded")
    return requests


class Recording:
    """A `decode.loop.Recorder` of greedy requests that start together."""

    def __init__(self, requests: Sequence[Request], draft_tokens: int) -> None:
        self.numbers = {id(request): number for number, request in enumerate(requests)}
        self.size = draft_tokens
        self.places = max(len(request.ids) + request.max_new_tokens for request in requests) + draft_tokens
        self.taps = torch.empty(0)
        self.passes: list[tuple[torch.Tensor, ...]] = []  # text [b], anchor [b], drafts [b,G], states [b,G,D]

    def rows(self, requests: Sequence[Request], device: torch.device) -> torch.Tensor:
        return torch.tensor([self.numbers[id(request)] for request in requests], device=device)

    def prompts(self, requests: Sequence[Request], taps: torch.Tensor) -> None:
        if not self.passes and not len(self.taps):
            self.taps = taps.new_zeros(len(self.numbers), self.places, *taps.shape[2:])
        self.taps[self.rows(requests, taps.device), : taps.shape[1]] = taps

    def round(
        self, requests: Sequence[Request], anchors: torch.Tensor, drafts: torch.Tensor, taps: torch.Tensor, last: torch.Tensor
    ) -> None:
        rows = self.rows(requests, taps.device)
        # those behind refused drafts are overwritten by the next round
        self.taps[rows[:, None], anchors[:, None] + torch.arange(taps.shape[1], device=taps.device)] = taps
        self.passes.append((rows, anchors, drafts, last[:, : self.size]))

    def rollouts(self, requests: Sequence[Request]) -> Rollouts:
        """What was recorded. Call it outside inference mode."""
        device = self.taps.device
        lengths = [len(request.ids) + len(request.output) - 1 for request in requests]
        ids = [token for request in requests for token in (request.ids + request.output)[:-1]]
        taps = torch.cat([self.taps[number, :length] for number, length in enumerate(lengths)])[None]
        counts = torch.tensor(lengths, device=device)
        starts = counts.cumsum(0) - counts
        texts = Texts(torch.tensor([ids], device=device), taps, starts.repeat_interleave(counts)[None])
        row, anchor, drafts, states = self._in_order()
        verdicts = [verdict for request in requests for verdict in request.rounds]
        accepted, committed, following = (
            torch.tensor(values, dtype=torch.long, device=device)
            for values in (
                [verdict.accepted for verdict in verdicts],
                [len(verdict.committed) for verdict in verdicts],
                [verdict.committed[-1] for verdict in verdicts],
            )
        )
        place = starts[row] + anchor
        tokens = torch.cat([texts.input_ids[0, place][:, None], drafts], 1)
        return Rollouts(texts, [request.output for request in requests], place, tokens, states, accepted, committed, following)

    def _in_order(self) -> list[torch.Tensor]:
        """The columns of `passes`, text after text."""
        if not self.passes:  # every first token was an end token, or the last one wanted
            none = torch.empty(0, dtype=torch.long, device=self.taps.device)
            return [none, none, none.new_empty(0, self.size), self.taps.new_empty(0, self.size, self.taps.shape[-1])]
        columns = [torch.cat(column) for column in zip(*self.passes, strict=True)]
        order = columns[0].argsort(stable=True)
        return [column[order] for column in columns]


def _first(accepted: torch.Tensor, size: int) -> torch.Tensor:
    """[M,G] the slot behind the accepted ones."""
    return torch.arange(size, device=accepted.device) == accepted[:, None]
