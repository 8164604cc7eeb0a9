"""SpecOPD against its definition, in value and every gradient; what a round would accept; planted faults.

Legend: B rows, T tokens, N anchors, G draft tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from branches_by_hand import AloneScorer, Branch, answers_batch, branches_of, loss_of_branches
from by_hand import F64, randomised, same_gradients
from specgraft.config import DistillSection
from specgraft.distill import onpolicy as module
from specgraft.distill.batch import Batch
from specgraft.distill.objective import Outcome
from specgraft.distill.onpolicy import onpolicy
from specgraft.distill.weights import end_to_end_weights
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared

VOCAB, G, ENDS = 20, 3, (4, 7)
OPTIONS = DistillSection(preset="specopd", chunk_rows=4)
KINDS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp"},
    "dflash": {"kind": "dflash"},
    "dflash2": {"kind": "dflash2", "conv_group": 8, "selector_rank": 6, "selector_top_k": 6},
    "vanilla": {"rank": 6},
    "gated": {"rank": 6, "markov_head": "gated"},
    "rnn": {"rank": 6, "markov_head": "rnn"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    drafter: Drafter
    shared: Shared
    batch: Batch
    scorer: AloneScorer

    def step(self, options: DistillSection = OPTIONS, seed: int = 1, **more: Any) -> Outcome:
        settings = {"score": self.scorer, "end_ids": ENDS, "compute": F64, "generator": torch.Generator().manual_seed(seed)} | more
        return onpolicy(self.drafter, self.shared, self.batch, options, **settings)

    def branches(self, many: int = 1) -> list[Branch]:
        return branches_of(self.drafter, self.shared, self.batch, self.scorer, many, ENDS)

    def expected(self, options: DistillSection = OPTIONS) -> torch.Tensor:
        confident = self.drafter.confidence_head is not None
        return loss_of_branches(self.branches(options.branches_per_anchor), options, self.drafter.config.kind, confident)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(vocab=VOCAB, dtype=F64, markov=1.0, spread=0.3)


@pytest.fixture(scope="module")
def make(target, tiny_drafter) -> Callable[..., Case]:
    """A case of this kind: two documents in row 0, one and padding in row 1, one anchor twice, one at the very end of a text."""
    scorer = AloneScorer(target)

    def build(kind: str = "vanilla", draft_tokens: int = G, anchors: Any = ((3, 6, 6, 10, 13), (2, 7, -1, -1, -1))) -> Case:
        drafter = randomised(tiny_drafter(target, draft_tokens=draft_tokens, layers=1, bigram=0.0, taps=(0, 2), **KINDS[kind]), spread=0.2)
        batch = answers_batch(scorer, [[8, 6], [8]], anchors, (0, 2), draft_tokens, VOCAB)
        return Case(drafter, Shared.of(target, 0), batch, scorer)

    return build


def agree(case: Case, options: DistillSection = OPTIONS, **more: Any) -> None:
    outcome = case.step(options, **more)
    expected = case.expected(options)
    assert float(outcome.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-8)
    idle = ("candidate_selector.none",) if "confidence" in options.weights("dspark") else ("confidence_head",)
    same_gradients(case.drafter, outcome.loss, expected, 1e-8, idle)


# --- the definition


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_equals_its_definition_in_value_and_every_gradient(make, kind: str) -> None:
    agree(make(kind))


@pytest.mark.parametrize("kind", ["rnn", "dflash2"])
def test_three_branches_an_anchor(make, kind: str) -> None:
    agree(make(kind), OPTIONS.model_copy(update={"branches_per_anchor": 3}))


def test_slots_behind_a_drafted_end_token_are_not_supervised(make) -> None:
    case = make("dflash")
    outcome = case.step(OPTIONS.model_copy(update={"branches_per_anchor": 8}))
    branches = case.branches(8)
    counts = [sum(len(one.p) > slot for one in branches) for slot in range(G)]
    assert outcome.sums["count"].tolist() == counts and counts[0] == 7 * 8 > counts[1] > counts[2] > 0
    agree(case, OPTIONS.model_copy(update={"branches_per_anchor": 8}))


@pytest.mark.parametrize("kind", ["vanilla", "dflash2", "mtp"])
def test_one_draft_token_needs_no_node(make, kind: str) -> None:
    case = make(kind, draft_tokens=1)
    case.scorer.seen = []
    agree(case)
    assert case.scorer.seen == []
