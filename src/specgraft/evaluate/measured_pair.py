"""The decode loop on given prompts, for whoever has to compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgraft.config import RunConfig
from specgraft.decode.loop import Request, decode
from specgraft.evaluate.metrics import accept_length_pooled
from specgraft.evaluate.stage import load_pair


def pooled_accept_length(config: RunConfig, checkpoint: Path, prompts: Sequence[list[int]], max_new_tokens: int) -> float:
    """Tokens per verify round over all greedy answers, bonus included, at the precision of evaluation."""
    both = load_pair(config, checkpoint, config.evaluate.dtype)
    requests = [Request(list(ids), max_new_tokens) for ids in prompts]
    decode(both, requests, config.evaluate.batch)
    found = accept_length_pooled([request.rounds for request in requests])
    assert found is not None, "prompts were given"
    return found
