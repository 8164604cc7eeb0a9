"""What a decode is asked for, and what it tells: requests, seconds, recorders.

Legend: G draft tokens, W width of a pass, K taps, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specgraft.decode.pair import Pair, context_limit
from specgraft.ops.sampling import Law
from specgraft.records import Verdict

GREEDY = Law()


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
    commit: float = 0.0  # part of `draft`: context of new positions
    accept: float = 0.0  # part of `rest`: the accept rule
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
