"""A step learnt a part at a time is the step learnt at once: loss, sums and every gradient, for every objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounds_by_hand import batch_of_texts, make, some_prompts
from test_ranks import CASES, KINDS, parts, rows_of

from branches_by_hand import KINDS as BRANCH_KINDS
from branches_by_hand import AloneScorer, answers_batch
from by_hand import F64, randomised
from specgraft.config import DistillSection
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch, Draws
from specgraft.distill.counting import Counted, count_branches, count_references, count_rollouts
from specgraft.distill.draft_opd import draft_opd
from specgraft.distill.objective import Outcome, objective
from specgraft.distill.onpolicy import onpolicy
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared

SHARES = [[0], [1], [2, 3]]  # row 3 has no slot
SAMPLED = {
    "drawn slots": ("dspark", DistillSection(slot_sampling=True)),
    "drawn slots, selector": ("dflash2", DistillSection(slot_sampling=True)),
}


def part_of(batch: Batch, rows: list[int]) -> Batch:
    """Some rows of a step, knowing where they stand in it."""
    count, width = batch.anchors.position.shape
    place = torch.arange(count * width).view(count, width)[rows]
    texts = Texts(*(getattr(batch.texts, field.name)[rows] for field in dataclasses.fields(Texts)))
    anchors = Anchors(*(getattr(batch.anchors, name)[rows] for name in ("position", "keep", "mask")))
    mask = None if batch.loss_mask is None else batch.loss_mask[rows]
    return Batch(texts, batch.last[rows], anchors, mask, Draws(count, width, place))


def summed(counted: list[Counted]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([each.denominators[name] for each in counted]).sum(0) for name in counted[0].denominators}


def gradients(drafter: Drafter, outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    for outcome in outcomes:
        outcome.loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}


def same(drafter: Drafter, whole: Outcome, pieces: list[Outcome]) -> None:
    assert float(sum(each.loss.detach() for each in pieces)) == pytest.approx(float(whole.loss.detach()), rel=1e-6) and whole.loss > 0
    for name, value in whole.denominators.items():
        assert all(float(each.denominators[name]) == pytest.approx(float(value), rel=1e-6) for each in pieces), name
        assert float(sum(each.numerators[name] for each in pieces)) == pytest.approx(float(whole.numerators[name]), rel=1e-6)
    for name, sums in whole.sums.items():
        torch.testing.assert_close(sum(each.sums[name] for each in pieces if name in each.sums), sums, rtol=1e-5, atol=1e-6)
    expected, found = gradients(drafter, [whole]), gradients(drafter, pieces)
    assert set(expected) == set(found) and len(found) > 8
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()), msg=lambda text, name=name: f"{name}: {text}")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("case", [*CASES, *SAMPLED])
def test_answers_in_parts(case: str) -> None:
    kind, options = {**CASES, **SAMPLED}[case]
    assert kind in KINDS
    drafter, shared = parts(kind)
    batch = rows_of([0, 1, 2, 3])
    pieces = [part_of(batch, rows) for rows in SHARES]
    known = summed([count_references(drafter, shared, each, options, F64, seeded()) for each in pieces])
    whole = objective(drafter, shared, batch, options, F64, seeded())
    assert set(whole.denominators) <= {*known, "confidence"}
    same(drafter, whole, [objective(drafter, shared, each, options, F64, seeded(), known) for each in pieces])


@pytest.mark.parametrize("kind", ["vanilla", "dflash2", "mtp"])
def test_branches_in_parts(tiny_target, tiny_drafter, kind: str) -> None:
    """The same branches are drawn in a part as in the whole, two an anchor, end tokens among them."""
    target = tiny_target(vocab=20, dtype=F64, markov=1.0, spread=0.3)
    drafter = randomised(tiny_drafter(target, draft_tokens=3, layers=1, bigram=0.0, taps=(0, 2), **BRANCH_KINDS[kind]), spread=0.2)
    shared, scorer, ends = Shared.of(target, 0), AloneScorer(target), (4, 7)
    batch = answers_batch(scorer, [[8, 6], [8], [5]], ((3, 6, 6, 10, 13), (2, 7, -1, -1, -1), (-1, -1, -1, -1, -1)), (0, 2), 3, 20)
    options = DistillSection(preset="specopd", chunk_rows=4, branches_per_anchor=2)
    pieces = [part_of(batch, [row]) for row in (0, 1, 2)]
    counted = [count_branches(drafter, shared, each, options, ends, F64, seeded()) for each in pieces]
    whole = onpolicy(drafter, shared, batch, options, scorer, ends, F64, seeded())
    known = summed(counted)
    found = [
        onpolicy(drafter, shared, each, options, scorer, ends, F64, seeded(), known, one.drawn)
        for each, one in zip(pieces, counted, strict=True)
    ]
    same(drafter, whole, found)


@pytest.mark.parametrize("more", [{}, {"rollout_estimator": "token"}], ids=["full", "token"])
def test_rounds_in_parts(tiny_target, tiny_drafter, more: dict[str, Any]) -> None:
    both = make(tiny_target, tiny_drafter, "vanilla")
    options = DistillSection(preset="draft_opd", chunk_rows=5, fused="off", **more)
    prompts, counts = some_prompts()
    pieces = [batch_of_texts(prompts[part], counts[part]) for part in (slice(0, 1), slice(1, 3), slice(3, 4))]
    cut = dataclasses.replace(pieces[0], loss_mask=torch.zeros_like(pieces[0].loss_mask))  # every answer was cut away
    count: Callable[[Batch], Counted] = lambda batch: count_rollouts(both, batch, options, F64, both.target.end_ids)  # noqa: E731
    counted = [count(each) for each in (*pieces, cut)]
    known = summed(counted)
    whole = draft_opd(both, batch_of_texts(prompts, counts), options, F64)
    found = [
        draft_opd(both, each, options, F64, None, None, known, one.rolled) for each, one in zip((*pieces, cut), counted, strict=True)
    ]
    same(both.drafter, whole, found)
    assert float(found[-1].loss.detach()) == 0 and set(found[-1].denominators) == set(whole.denominators)
