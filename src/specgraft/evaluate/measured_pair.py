"""The decode loop on given prompts, for whoever has to compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgraft.config import RunConfig
from specgraft.decode.loop import Request, decode
from specgraft.decode.pair import pair
from specgraft.drafters.drafter import Drafter
from specgraft.evaluate.metrics import accept_length_pooled, committed
from specgraft.evaluate.stage import load_pair
from specgraft.targets.model import Target


def pooled_accept_length(config: RunConfig, checkpoint: Path, prompts: Sequence[list[int]], max_new_tokens: int) -> float:
    """Tokens per verify round over all greedy answers, bonus included, at the precision of evaluation."""
    both = load_pair(config, checkpoint, config.evaluate.dtype)
    requests = [Request(list(ids), max_new_tokens) for ids in prompts]
    decode(both, requests, config.evaluate.batch)
    found = accept_length_pooled([request.rounds for request in requests])
    assert found is not None, "prompts were given"
    return found


def round_sums(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, batch: int
) -> tuple[float, float, float, float]:
    """Of greedy answers: sum over requests of tokens per round, requests that had a round, tokens, rounds. Sums of ranks add up."""
    requests = [Request(list(ids), max_new_tokens) for ids in prompts]
    if requests:
        decode(pair(target, drafter), requests, batch)
    had = [request.rounds for request in requests if request.rounds]
    tokens = [committed(rounds) for rounds in had]
    ratios = sum(own / len(rounds) for own, rounds in zip(tokens, had, strict=True))
    return ratios, len(had), sum(tokens), sum(len(rounds) for rounds in had)
