"""What a checkpoint keeps of branches that are drawn ahead fits any number of ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgraft.distill.branches import Drawn
from specgraft.records import Features
from specgraft.train import ahead
from specgraft.train.batch import step_shares
from specgraft.train.shares import Share, stand_in

LENGTHS = [9, 30, 14, 6, 22, 11, 17]


class Rows:
    """A source of conversations whose answers begin at their fifth token; the fourth one has an answer of a single token."""

    lengths = LENGTHS

    def rows(self, order: Any):
        for index in order:
            length = LENGTHS[index]
            mask = torch.arange(length) >= 5
            yield Features(f"p{index}", torch.arange(length), mask, torch.zeros(length, 2, 4), torch.zeros(length, 4))


def share_of(rank: int, ranks: int, accumulate: int, row_tokens: int = 0) -> Share:
    shares = step_shares(
        Rows(), 7, 5, 4, 64, 0, 0, 1, torch.device("cpu"), row_tokens, None, accumulate, rank, ranks  # type: ignore[arg-type]
    )
    return next(shares)


def marked(share: Share, kept: list[int]) -> ahead.Turn:
    """Every anchor drew its own number among those of the step, twice (two branches), in three nodes."""
    config: Any = type("Config", (), {"taps": (0, 1), "hidden_size": 4, "draft_tokens": 4})
    batches = [stand_in(config, torch.float32, torch.device("cpu")) if micro is None else micro.batch for micro in share.micros]
    numbers = [torch.zeros(batch.anchors.position.shape, dtype=torch.long) for batch in batches]
    for micro, row, here, there in share.blocks(kept):
        numbers[micro][row, here] = torch.arange(there.start, there.stop)
    drawn = [Drawn((each[..., None, None] * 10 + torch.tensor([[0] * 3, [1] * 3])).flatten(1, 2)) for each in numbers]
    return ahead.Turn(0, share, batches, drawn)


@pytest.mark.parametrize("row_tokens", [0, 40])
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 3), (2, 2), (4, 2), (3, 4)])
def test_kept_by_some_ranks_and_spread_over_others(monkeypatch: pytest.MonkeyPatch, ranks: int, accumulate: int, row_tokens: int) -> None:
    kept = share_of(0, 1, 1).kept().tolist()
    assert kept[3] == 0 and sum(kept) > 20 and max(kept) == 5
    monkeypatch.setattr(ahead, "total", lambda values: torch.tensor(kept) if values.dim() == 1 else values)
    turns = [marked(share_of(rank, ranks, accumulate, row_tokens), kept) for rank in range(ranks)]
    table = sum(ahead.gathered(turn) for turn in turns)
    assert torch.equal(table, (torch.arange(sum(kept))[:, None, None] * 10 + torch.tensor([[0] * 3, [1] * 3])).int())
    for rank in range(2):  # another number of ranks
        other = marked(share_of(rank, 2, 1, row_tokens), kept)
        found = ahead.spread(other.share, other.batches, table)
        assert other.drawn is not None
        for batch, tokens, drawn in zip(other.batches, found, other.drawn, strict=True):
            keep = batch.anchors.keep.repeat_interleave(2, 1)
            assert keep.any() and torch.equal(tokens[keep], drawn.tokens[keep]) and not tokens[~keep].any()


def test_branches_of_another_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    share = share_of(0, 1, 1)
    with pytest.raises(ValueError, match="the checkpoint has branches at 3 anchors of step 1"):
        ahead.spread(share, [share.micros[0].batch], torch.zeros(3, 1, 3, dtype=torch.int32))  # type: ignore[union-attr]
