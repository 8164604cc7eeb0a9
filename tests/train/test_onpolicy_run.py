"""A run that learns from its own branches: resumed bit for bit, scored by what it is given, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from branches_by_hand import AloneScorer
from specgraft.log import read_metrics
from specgraft.targets.model import Target
from specgraft.targets.scoring import Scorer
from specgraft.train import tasks
from specgraft.train.checkpoint import checkpoints
from specgraft.train.told import MEASURED

BRANCHES: dict[str, Any] = {"preset": "specopd", "branches_per_anchor": 2}
KINDS: dict[str, dict[str, Any]] = {"dspark": {}, "dflash2": {"kind": "dflash2", "conv_group": 8, "selector_rank": 8, "selector_top_k": 4}}


def drafters(kind: str) -> dict[str, Any]:
    return {"draft_tokens": 3, "layers": 1, "markov_rank": 8, **KINDS[kind]}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in MEASURED and not key.endswith("seconds")} for row in read_metrics(path)]


def watching(trees: list[torch.Tensor]) -> Callable[[Target], Scorer]:
    """A scorer that keeps the branches it is asked for, a tensor a step."""

    def make(target: Target) -> Scorer:
        scorer = AloneScorer(target)

        def ask(*args: Any) -> Any:
            trees.append(torch.cat([tree.branches for tree in args[1]]))
            return scorer(*args)

        return ask

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_six_steps_equal_three_and_three(broken_off, kind: str) -> None:
    straight, stopped = broken_off(tasks, "onpolicy", AloneScorer, distill=BRANCHES, drafters=drafters(kind))
    assert rows_of(straight.metrics) == rows_of(stopped.metrics)


def test_what_a_step_reports(ready) -> None:
    run = ready()
    run.train(AloneScorer, distill=BRANCHES)
    rows = [row for row in read_metrics(run.run.metrics) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        parts = [row[f"{name}_seconds"] for name in ("sample", "score", "learn")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["seconds"], rel=1e-6)
        assert len(row["alpha"]) == len(row["accepted"]) == 3 and all(0 <= value <= 1 for value in [*row["alpha"], *row["accepted"]])
        assert row["branch_accept_length"] == pytest.approx(1 + sum(row["accepted"])) and 1 <= row["branch_accept_length"] <= 4
        assert 2 * 4 * 6 < row["slots"] <= 3 * 2 * 4 * 6 and "ce" not in row and row["confidence"] > 0
    assert [row["step"] for row in read_metrics(run.run.metrics) if row["kind"] == "validate"] == [0, 2, 4, 6]


def test_branches_are_drawn_anew_with_the_weights_of_every_step(ready) -> None:
    """The same anchors and numbers twice, once with a learning rate that moves nothing: the trees part after the first update."""
    moving: list[torch.Tensor] = []
    still: list[torch.Tensor] = []
    ready("moving").train(watching(moving), distill=BRANCHES, train={"lr": 0.05, "warmup": 0.0})
    ready("still").train(watching(still), distill=BRANCHES, train={"lr": 1e-12, "warmup": 0.0})
    same = [torch.equal(a, b) for a, b in zip(moving, still, strict=True)]
    assert len(same) == 6 and same[0] and not any(same[1:])


def test_the_target_itself_scores_where_no_scorer_is_given(ready) -> None:
    """One packed pass of the target in this process, against every branch alone through transformers' own model."""
    alone, own = ready("alone"), ready("own")
    alone.train(AloneScorer, distill=BRANCHES)
    own.train(distill=BRANCHES)
    rows = [[row for row in rows_of(run.run.metrics) if row["kind"] == "train"] for run in (alone, own)]
    for left, right in zip(*rows, strict=True):
        assert left["slots"] == right["slots"] and left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left["alpha"] == pytest.approx(right["alpha"], rel=1e-3)


def test_a_run_of_branches_packs_conversations_into_rows(ready) -> None:
    """Several documents a row; the law of a step is the same, its draws are not."""
    run = ready()
    run.train(AloneScorer, distill=BRANCHES, train={"packing": "rows", "row_tokens": 1024, "steps": 2})
    rows = [row for row in read_metrics(run.run.metrics) if row["kind"] == "train"]
    assert len(rows) == 2 and all(row["slots"] > 2 * 4 * 6 for row in rows)


def test_branches_drawn_two_steps_ahead_are_resumed_bit_for_bit(broken_off) -> None:
    """A checkpoint keeps what is drawn and not learnt from: other weights would draw it otherwise."""
    straight, stopped = broken_off(tasks, "onpolicy", AloneScorer, distill=BRANCHES, stream={"staleness": 2})
    rows = rows_of(straight.metrics)
    assert rows == rows_of(stopped.metrics)
    assert [row["staleness"] for row in rows if row["kind"] == "train"] == [0, 1, 2, 2, 2, 2]
    kept = load_file(checkpoints(straight.checkpoints)[0] / "branches.safetensors")
    assert {name: tuple(each.shape[1:]) for name, each in kept.items()} == {"3:1": (2, 2), "4:2": (2, 2)}  # branches an anchor, nodes
    assert not (checkpoints(straight.checkpoints)[1] / "branches.safetensors").exists()


def test_every_step_is_drawn_by_the_weights_of_the_step_that_is_told(ready) -> None:
    """By hand: a run with the same trees at a lag of one has the losses of its own weights on branches of the step before."""
    drawn: dict[int, list[torch.Tensor]] = {0: [], 1: [], -1: []}
    for lag in (0, 1):
        ready(f"lag{lag}").train(watching(drawn[lag]), distill=BRANCHES, stream={"staleness": lag}, train={"lr": 0.05, "warmup": 0.0})
    ready("still").train(watching(drawn[-1]), distill=BRANCHES, train={"lr": 1e-12, "warmup": 0.0})
    assert all(len(found) == 6 for found in drawn.values())
    start = [torch.equal(late, still) for late, still in zip(drawn[1], drawn[-1], strict=True)]
    assert start == [True, True, False, False, False, False]  # the weights of the start draw for two steps
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("lag", [0, 2])
def test_what_is_learnt_is_saved_when_no_more_scores_come(ready, lag: int) -> None:
    """The run goes on from there as if nothing had been."""
    more: dict[str, Any] = {"distill": BRANCHES, "stream": {"staleness": lag}, "train": {"checkpoint_every": 10}}

    def dies(target: Target) -> Scorer:
        alone, asked = AloneScorer(target), []

        def score(*trees: Any) -> Any:
            asked.append(1)
            if len(asked) == 5:
                raise ValueError("stream: producer-0 died 3 times")
            return alone(*trees)

        return score

    whole, broken = ready("whole"), ready("broken")
    whole.train(AloneScorer, **more)
    with pytest.raises(ValueError, match="producer-0 died"):
        broken.train(dies, **more)
    assert [path.name for path in checkpoints(broken.run.checkpoints)] == ["step-000004"]
    broken.train(AloneScorer, **more)
    assert rows_of(whole.run.metrics) == rows_of(broken.run.metrics)
    ends = [load_file(checkpoints(each.run.checkpoints)[-1] / "drafter.safetensors") for each in (whole, broken)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
