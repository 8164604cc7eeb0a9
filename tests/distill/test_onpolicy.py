"""SpecOPD against its definition, in value and every gradient; what a round would accept; planted faults.

Legend: B rows, T tokens, N anchors, G draft tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from branches_by_hand import KINDS, AloneScorer, Branch, answers_batch, branches_of, loss_of_branches
from by_hand import F64, divergences, randomised, same_gradients
from specgraft.config import DistillSection
from specgraft.distill import objective, ranks
from specgraft.distill import onpolicy as module
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch, Blocks
from specgraft.distill.branches import branch_blocks
from specgraft.distill.objective import Outcome, learn
from specgraft.distill.onpolicy import onpolicy
from specgraft.distill.weights import decay_weights, end_to_end_weights
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import walk
from specgraft.ops.sampling import Law
from specgraft.records import TargetScores
from specgraft.run_file import validate
from specgraft.train.stage import summary

VOCAB, G, ENDS = 20, 3, (4, 7)
OPTIONS = DistillSection(preset="specopd", chunk_rows=4)


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


def test_pointwise_losses_have_a_sense_on_branches_too(make) -> None:
    """Every one by autograd over the full laws, under the fixed slot weights."""
    mix = {"kl": 0.5, "rkl": 0.2, "jsd": 0.9, "tv": 0.6, "l1": 0.4, "lk_alpha": 0.25, "lk_hybrid": 0.35}
    options = DistillSection(preset="specopd", chunk_rows=4, e2e_tv=0.0, confidence=0.0, **mix)
    case = make("gated")
    outcome = case.step(options)
    decay, total, weights = decay_weights(G, options.decay).double(), torch.zeros((), dtype=F64), 0.0
    for one in case.branches():
        for slot, (p, q) in enumerate(zip(one.p, one.q, strict=True)):
            losses = divergences(q.log(), p, 0, options.lk_eta)
            total = total + decay[slot] * sum(weight * losses[name] for name, weight in mix.items())
            weights += float(decay[slot])
    expected = total / (weights + 1e-6)
    assert float(outcome.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-7)
    same_gradients(case.drafter, outcome.loss, expected, 1e-7, ("confidence_head",))
    assert {*mix, "alpha", "hit", "count", "accepted"} == set(outcome.sums)


# --- the same gradient by other ways


@pytest.mark.parametrize("kind", ["rnn", "dflash2"])
def test_the_gradient_is_that_of_finite_differences(make, kind: str) -> None:
    """Branches and the target's laws stand still; a step of 1e-5 along a random direction of all parameters."""
    case, options = make(kind), OPTIONS.model_copy(update={"confidence": 0.0})
    outcome = case.step(options)
    asked = case.scorer.seen
    parameters = list(case.drafter.parameters())
    generator = torch.Generator().manual_seed(0)
    way = [torch.randn(p.shape, generator=generator, dtype=F64) for p in parameters]
    grads = torch.autograd.grad(outcome.loss, parameters, allow_unused=True)
    slope = sum(float((g * d).sum()) for g, d in zip(grads, way, strict=True) if g is not None)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, way, strict=True):
                p += sign * 1e-5 * d
            values.append(float(case.step(options).loss))
            for p, d in zip(parameters, way, strict=True):
                p -= sign * 1e-5 * d
        assert all(torch.equal(a[1].branches, b[1].branches) for a, b in zip(asked, case.scorer.seen, strict=True))
    assert slope != 0 and (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("kind", ["vanilla", "dflash2"])
def test_the_gradient_is_that_of_overlaps_under_fixed_weights(make, kind: str) -> None:
    """Sum of c_j TV_j with c detached (algorithms.md 3.7)."""
    case, options = make(kind), OPTIONS.model_copy(update={"confidence": 0.0})
    outcome, branches = case.step(options), case.branches()
    total = torch.zeros((), dtype=F64)
    for one in branches:
        alpha = torch.stack(one.alpha)
        total = total + (end_to_end_weights(alpha.detach(), torch.ones(len(alpha), dtype=torch.bool)) * (1 - alpha)).sum()
    same_gradients(case.drafter, outcome.loss, total / (len(branches) + 1e-6), 1e-8, ("confidence_head",))


@pytest.mark.parametrize("kind", ["gated", "dflash2"])
def test_exact_prefix_weights_are_accept_ratios_of_the_drawn_tokens(make, kind: str) -> None:
    """rho_{<j} in place of S_{j-1}, both without gradient (algorithms.md 3.8, end)."""
    case = make(kind)
    options = OPTIONS.model_copy(update={"confidence": 0.0, "prefix_weights": "exact", "branches_per_anchor": 2})
    outcome, branches = case.step(options), case.branches(2)
    total, value = torch.zeros((), dtype=F64), 0.0
    for one in branches:
        alpha, behind = one.alpha, 0.0
        for slot in reversed(range(len(alpha))):
            behind = 1.0 + (float(alpha[slot + 1].detach()) * behind if slot + 1 < len(alpha) else 0.0)
            total = total + one.reached[slot] * behind / len(alpha) * (1 - alpha[slot])
        value += 1 - sum(r * float(a.detach()) for r, a in zip(one.reached, alpha, strict=True)) / len(alpha)
    assert float(outcome.loss.detach()) == pytest.approx(value / (len(branches) + 1e-6), rel=1e-8)
    same_gradients(case.drafter, outcome.loss, total / (len(branches) + 1e-6), 1e-8, ("confidence_head",))


# --- what a step reports


@pytest.mark.parametrize("kind", ["vanilla", "dflash2", "mtp"])
def test_overlap_by_position_and_the_accept_length_of_branches(make, kind: str) -> None:
    case = make(kind)
    outcome, branches = case.step(), case.branches()
    for slot in range(G):
        there = [one for one in branches if len(one.p) > slot]
        assert float(outcome.sums["count"][slot]) == len(there)
        assert float(outcome.sums["alpha"][slot]) == pytest.approx(sum(float(one.alpha[slot].detach()) for one in there), rel=1e-5)
        expected = sum(one.reached[slot] * float(one.alpha[slot].detach()) for one in there)
        assert float(outcome.sums["accepted"][slot]) == pytest.approx(expected, rel=1e-5)
    assert not {"ce", "target_ce", "picked", "recall", "oracle", "path", "taught"} & set(outcome.sums)
    assert "accepted" not in case.step(OPTIONS.model_copy(update={"branch_temperature": 1.5})).sums  # the identity is one of temperature 1
    row = summary(outcome, sum(outcome.seconds.values()) + 1.0)
    assert row["branch_accept_length"] == pytest.approx(1 + float(outcome.sums["accepted"].sum()) / len(branches))
    assert row["learn_seconds"] == pytest.approx(outcome.seconds["learn"] + 1.0) and row["slots"] == int(outcome.sums["count"].sum())
    assert set(outcome.seconds) == {"sample", "score", "learn"} and all(value > 0 for value in outcome.seconds.values())


def toy(laws: dict[tuple[int, ...], list[float]], q: list[list[float]]) -> tuple[Any, Shared, Callable[[list[list[int]]], Blocks]]:
    """A drafter with these laws, slot by slot, and blocks of branches whose target has `laws` behind each prefix."""
    size, states = len(q[0]), torch.tensor(q, dtype=F64).log()

    class Stub(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.Parameter(states.clone())
            self.config = type("Shape", (), {"kind": "stub", "draft_tokens": len(q)})()
            self.markov_head = self.selector = self.confidence_head = None

    def blocks(branches: list[list[int]]) -> Blocks:
        tokens = torch.tensor(branches).view(1, len(branches), len(q) - 1)
        nodes = torch.tensor([[laws[tuple(branch[: slot + 1])] for slot in range(len(branch))] for branch in branches], dtype=F64).log()
        ids = torch.zeros(1, 1, dtype=torch.long)
        texts = Texts(ids, torch.zeros(1, 1, 1, size, dtype=F64), ids)
        anchors = Anchors(ids, torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, len(q), dtype=torch.bool))
        batch = Batch(texts, torch.tensor(laws[()], dtype=F64).log().view(1, 1, size), anchors)
        return branch_blocks(batch, tokens, nodes.view(1, len(branches), len(q) - 1, size), len(branches), ())

    eye = torch.eye(size, dtype=F64)
    return Stub(), Shared(eye, eye, torch.nn.Identity(), 0), blocks


def toy_step(stub: Any, shared: Shared, blocks: Blocks, options: DistillSection = OPTIONS) -> Outcome:
    hidden = stub.h.expand(1, blocks.mask.shape[1], *stub.h.shape)
    return learn(stub, shared, blocks, hidden, torch.ones(len(stub.h), dtype=F64), options, F64, own=True)


def test_golden_values_of_two_slots() -> None:
    """algorithms.md 1.4: both first tokens are equally likely, so that one branch each is the exact mean over branches."""
    stub, shared, blocks = toy({(): [0.7, 0.3], (0,): [0.9, 0.1], (1,): [0.2, 0.8]}, [[0.5, 0.5], [0.6, 0.4]])
    outcome = toy_step(stub, shared, blocks([[0], [1]]))
    accepted = outcome.sums["accepted"] / 2
    assert accepted.tolist() == pytest.approx([0.8, 0.53]) and float(1 + accepted.sum()) == pytest.approx(2.33)
    assert (outcome.sums["alpha"] / 2).tolist() == pytest.approx([0.8, 0.65])
    assert float(outcome.loss.detach()) == pytest.approx(1 - (0.8 + 0.52) / 2, rel=1e-6)  # mean of S_2 is .52, not .53
    exact = toy_step(stub, shared, blocks([[0], [1]]), OPTIONS.model_copy(update={"prefix_weights": "exact"}))
    assert float(exact.loss.detach()) == pytest.approx(1 - (0.8 + 0.53) / 2, rel=1e-6)


def test_the_accept_length_of_branches_is_unbiased_over_all_branches() -> None:
    """Three tokens, three slots: the mean over the drafter's law is the sum of products of min(p, q) (identities 4 and 5)."""
    generator = torch.Generator().manual_seed(5)

    def law() -> list[float]:
        return torch.randn(3, generator=generator, dtype=F64).softmax(-1).tolist()

    paths = [(), *((a,) for a in range(3)), *((a, b) for a in range(3) for b in range(3))]
    laws, q = {path: law() for path in paths}, [law() for _ in range(3)]
    stub, shared, blocks = toy(laws, q)
    found = torch.zeros(3, dtype=F64)
    for a in range(3):
        for b in range(3):
            found += q[0][a] * q[1][b] * toy_step(stub, shared, blocks([[a, b]])).sums["accepted"]
    truth = [
        sum(
            math.prod(min(laws[path[:slot]][token], q[slot][token]) for slot, token in enumerate(path))
            for path in itertools.product(range(3), repeat=count)
        )
        for count in (1, 2, 3)
    ]
    assert found.tolist() == pytest.approx(truth, rel=1e-5)


# --- alignment, by planted faults


FAULTS: dict[str, Callable[[Any], Any]] = {}


def fault(name: str) -> Callable[[Any], Any]:
    def keep(plant: Any) -> Any:
        FAULTS[name] = plant
        return plant

    return keep


@fault("an anchor one token late")
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.graft

    def late(batch: Batch, tokens: torch.Tensor, many: int) -> Any:
        anchors = dataclasses.replace(batch.anchors, position=(batch.anchors.position + 1).clamp(max=batch.last.shape[1] - 1))
        return real(dataclasses.replace(batch, anchors=anchors), tokens, many)

    monkeypatch.setattr(module, "graft", late)


@fault("the first law read one token early")
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.branch_blocks
    monkeypatch.setattr(module, "branch_blocks", lambda batch, *rest: real(dataclasses.replace(batch, last=batch.last.roll(1, 1)), *rest))


@fault("a node's law given to its own slot")
def _own_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.branch_blocks

    def shifted(*args: Any) -> Blocks:
        blocks = real(*args)
        return dataclasses.replace(blocks, places=torch.cat([blocks.places[..., 1:], blocks.places[..., -1:]], -1))

    monkeypatch.setattr(module, "branch_blocks", shifted)


@fault("branches of two anchors exchanged")
def _exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.score_branches
    monkeypatch.setattr(module, "score_branches", lambda *args: real(*args).roll(1, 1))


@fault("the drawn token of a slot taken for the one before it")
def _previous(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.branch_blocks

    def shifted(*args: Any) -> Blocks:
        blocks = real(*args)
        return dataclasses.replace(blocks, tokens=torch.cat([blocks.tokens[..., 1:], blocks.tokens[..., -1:]], -1))

    monkeypatch.setattr(module, "branch_blocks", shifted)


@fault("slots behind an end token learnt from")
def _no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.branch_blocks
    monkeypatch.setattr(module, "branch_blocks", lambda *args: real(*args[:-1], ()))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught_by_the_definition(make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = make("vanilla", anchors=((3, 5, 6, 10, 12), (2, 6, -1, -1, -1)))
    options = OPTIONS.model_copy(update={"branches_per_anchor": 3})
    agree(case, options)
    assert any(len(one.p) < G for one in case.branches(3))  # an end token was drawn
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        agree(case, options)


def drawn_now(case: Case, drafter: Drafter, seed: int) -> list[torch.Tensor]:
    """Branches that decoding's own walk draws from `drafter`, by tree."""
    anchors = case.batch.anchors
    with torch.no_grad():
        hidden = drafter(case.shared, case.batch.texts, anchors.position)
    uniforms = torch.rand((*anchors.keep.shape, G - 1), generator=torch.Generator().manual_seed(seed), dtype=F64)
    uniforms = torch.cat([uniforms, uniforms[..., :1]], -1)  # of the last draft, which no branch holds
    before = case.batch.texts.input_ids.gather(1, anchors.position)
    count = int(anchors.keep.sum())
    with torch.no_grad():
        tokens = walk(drafter, case.shared, hidden[anchors.keep], before[anchors.keep], [Law(1.0)] * count, uniforms[anchors.keep]).tokens
    starts = case.batch.texts.starts.gather(1, anchors.position)[anchors.keep]
    row = anchors.keep.nonzero()[:, 0] * 1000 + starts
    return [tokens[row == key, : G - 1] for key in row.unique()]


def two_steps(case: Case) -> None:
    """Every update draws from the drafter as it then is, by the law of decoding."""
    optimizer = torch.optim.SGD(case.drafter.parameters(), lr=30.0)
    before = copy.deepcopy(case.drafter)
    for seed in (1, 2):
        outcome = case.step(seed=seed)
        asked = [tree.branches for _, tree in case.scorer.seen]
        expected = drawn_now(case, case.drafter, seed)
        assert all(torch.equal(a, b) for a, b in zip(asked, expected, strict=True)), f"step {seed}"
        if seed == 1:
            outcome.loss.backward()
            optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(asked, drawn_now(case, before, 2), strict=True))  # the step moved the law


@pytest.mark.parametrize("kind", ["vanilla", "dflash2", "mtp"])
def test_branches_are_drawn_from_the_drafter_of_this_very_step(make, kind: str) -> None:
    two_steps(make(kind))


def test_a_stale_drafter_for_sampling_is_caught(make, monkeypatch: pytest.MonkeyPatch) -> None:
    case, real = make("vanilla"), module.grow
    stale = copy.deepcopy(case.drafter)

    def grow(drafter: Drafter, shared: Shared, batch: Batch, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return real(stale, shared, batch, stale(shared, batch.texts, batch.anchors.position), *rest)

    monkeypatch.setattr(module, "grow", grow)
    with pytest.raises(AssertionError, match="step 2"):
        two_steps(case)


# --- sizes, ranks, refusals


@pytest.mark.parametrize("kind", ["rnn", "dflash2"])
def test_chunks_do_not_matter(make, kind: str) -> None:
    case = make(kind)
    outcomes = [case.step(OPTIONS.model_copy(update={"chunk_rows": rows})) for rows in (1, 3, 1000)]
    for other in outcomes[1:]:
        assert float(other.loss.detach()) == pytest.approx(float(outcomes[0].loss.detach()), rel=1e-12)
        same_gradients(case.drafter, other.loss, outcomes[0].loss, 1e-10)
        outcomes[0] = case.step(OPTIONS.model_copy(update={"chunk_rows": 1}))  # goes backward once


class Widest(TorchDispatchMode):
    """The most rows of [.., V] that any tensor of a step holds."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.dim() and each.shape[-1] == self.vocab:
                self.rows = max(self.rows, each.numel() // self.vocab)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_of_a_whole_tree_exist(make, target, kind: str) -> None:
    case = make(kind)
    nodes = 8 * case.batch.anchors.keep.sum() * (G - 1)
    zeros: Any = lambda stems, trees: [TargetScores(torch.zeros(*tree.branches.shape, 32, dtype=F64)) for tree in trees]  # noqa: E731
    with Widest(VOCAB) as widest:
        case.step(OPTIONS.model_copy(update={"branches_per_anchor": 8, "chunk_rows": 16}), score=zeros).loss.backward()
    assert 16 <= widest.rows <= 32 < nodes  # a chunk of the draft's and the target's logits; [32,V] is the head itself


def share(case: Case, rows: list[int]) -> Case:
    pick = {f.name: getattr(case.batch.texts, f.name)[rows] for f in dataclasses.fields(Texts)}
    anchors = Anchors(*(getattr(case.batch.anchors, name)[rows] for name in ("position", "keep", "mask")))
    return dataclasses.replace(case, batch=Batch(Texts(**pick), case.batch.last[rows], anchors))


@pytest.mark.parametrize("kind", ["vanilla", "dflash2"])
def test_two_ranks_with_unequal_shares_step_as_one(make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Denominators are summed over ranks, gradients averaged; the branches are given, as ranks draw their own."""
    whole = make(kind)
    tokens = torch.randint(2, VOCAB, (2, 5, G - 1), generator=torch.Generator().manual_seed(4))
    shares = [share(whole, [0]), share(whole, [1])]
    grown = {id(whole.batch): tokens, id(shares[0].batch): tokens[:1], id(shares[1].batch): tokens[1:]}
    monkeypatch.setattr(module, "grow", lambda drafter, shared, batch, *rest: grown[id(batch)])
    alone = whole.step()
    sums: list[list[torch.Tensor]] = []
    for one in shares:  # what each rank would give to the others
        own: list[torch.Tensor] = []
        with monkeypatch.context() as patch:
            for place in (ranks,):
                patch.setattr(place, "total", lambda values, own=own: own.append(values) or values)
            one.step()
        sums.append(own)
    total = torch.zeros((), dtype=F64)
    for one in shares:
        both = iter([a + b for a, b in zip(*sums, strict=True)])
        with monkeypatch.context() as patch:
            for place in (ranks,):
                patch.setattr(place, "total", lambda values, both=both: next(both))
            patch.setattr(objective, "world", lambda: 2)
            total = total + one.step().loss / 2
    assert float(total.detach()) == pytest.approx(float(alone.loss.detach()), rel=1e-9)
    same_gradients(whole.drafter, total, alone.loss, 1e-8)


def test_a_batch_without_an_anchor_is_zero_with_a_graph(make) -> None:
    case = make("vanilla", anchors=((-1,), (-1,)))
    outcome = case.step()
    assert float(outcome.loss.detach()) == 0 and not outcome.sums["count"].any()
    outcome.loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in case.drafter.parameters())


def test_a_tiny_run_raises_acceptance(make) -> None:
    """The accept length of the branches grows."""
    case = make("vanilla")
    optimizer = torch.optim.AdamW(case.drafter.parameters(), lr=2e-2)
    lengths = []
    for seed in range(30):
        outcome = case.step(OPTIONS.model_copy(update={"branches_per_anchor": 2}), seed)
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(summary(outcome)["branch_accept_length"])
    assert sum(lengths[-5:]) > 1.3 * sum(lengths[:5])


@pytest.mark.parametrize(
    ("kind", "section", "key"),
    [
        ("dspark", {"preset": "specopd", "ce": 0.1}, "ce"), ("dspark", {"slots": "branches"}, "ce"), ("mtp", {"preset": "specopd", "dpace": 1.0}, "dpace"),
        ("dflash2", {"preset": "specopd", "selector": 1.0}, "selector"), ("dflash2", {"preset": "dflash2_kl", "slots": "branches"}, "selector"),
        ("dspark", {"preset": "specopd", "e2e_tv": 0.0, "kl": 1.0, "slot_sampling": True}, "slot_sampling"),
        ("dspark", {"preset": "specopd", "prefix_weights": "exact", "branch_temperature": 0.7}, "prefix_weights"),
        ("dspark", {"preset": "e2e_tv", "slots": "branches", "ce": 1.0}, "ce"),
    ],
)  # fmt: skip
def test_what_branches_cannot_teach_is_refused_by_key_when_the_run_file_is_read(make, kind: str, section: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"distill\.{key}") as caught:
        validate({"drafters": {"kind": kind}, "distill": section}, "test")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"distill\.{key}"):
        make({"dspark": "vanilla"}.get(kind, kind)).step(DistillSection.model_validate(section))
    validate({"drafters": {"kind": kind}, "distill": {**section, "preset": "e2e_tv", "slots": "references", "branch_temperature": 1.0, "slot_sampling": False}}, "test")


@pytest.mark.parametrize(
    "section",
    [
        {"slots": "rollouts"}, {"preset": "specopd", "slots": "rollouts"}, {"preset": "draft_opd", "kl": 1.0}, {"preset": "draft_opd", "slot_sampling": True},
        {"preset": "draft_opd", "slots": "branches"}, {"preset": "draft_opd", "slots": "references"}, {"preset": "specopd", "e2e_tv": 0.0},
        {"preset": "specopd", "branch_temperature": 1e-45},
    ],
)  # fmt: skip
def test_what_teaches_nothing_is_refused_when_the_run_file_is_read(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"distill") as caught:
        validate({"drafters": {"kind": "dspark"}, "distill": section}, "test")
    assert "\n" not in str(caught.value)


def test_a_scorer_that_answers_another_tree_is_refused(make) -> None:
    case = make("vanilla")
    with pytest.raises(ValueError, match="trees and answered 0"):
        case.step(score=lambda stems, trees: [])
    with pytest.raises(ValueError, match="the scorer gave states of shape"):
        case.step(score=lambda stems, trees: [TargetScores(torch.zeros(1, 1, 32)) for _ in trees])
