"""The objective of a batch against a plain loop over anchors, in value and every gradient; what never trains.

Legend: B rows, T tokens, N anchors, G draft tokens, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from by_hand import F64, batch_of, loss_by_hand, randomised, same_gradients
from specgraft.config import DistillSection
from specgraft.distill import objective as module
from specgraft.distill.anchors import Anchors, slot_mask
from specgraft.distill.batch import Batch
from specgraft.distill.objective import LEAST, objective
from specgraft.distill.statistics import slot_statistics
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared
from specgraft.ops.vocab_loss.naive import POINTWISE
from specgraft.targets.model import Target

VOCAB = 64
OPTIONS = DistillSection(chunk_rows=5)
ZERO = dict.fromkeys((*POINTWISE, "dpace", "e2e_tv", "selector", "confidence"), 0.0)


def mixed(**weights: float) -> DistillSection:
    """These objectives and no others."""
    return DistillSection.model_validate({"chunk_rows": 5, **ZERO, **weights})


def shared_of(target: Target) -> Shared:
    return Shared(target.embedding.weight, target.head.weight, target.final_norm, 0)


def three_rows() -> Batch:
    return batch_of([12, 17, 9], [[5, 6, 9], [5, 11, 15], [7, -1, -1]], 5, 3)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return tiny_target(dtype=F64, markov=1.0, spread=0.3)


@pytest.fixture
def drafter(target, tiny_drafter) -> Drafter:
    """Float64 DSpark, three drafts, every weight random, norms not one."""
    return randomised(tiny_drafter(target, draft_tokens=3, layers=2, bigram=0.0, rank=6))


# --- against the loop


def compare(drafter: Drafter, shared: Shared, batch: Batch, options: DistillSection, still: Any = ()) -> None:
    mix = options.weights(drafter.config.kind)
    if drafter.confidence_head is None:
        mix.pop("confidence", None)
    outcome = objective(drafter, shared, batch, options, F64)
    how = {"decay": options.decay, "eta": options.lk_eta, "delta": options.dpace_delta}
    loss, numerators, denominators, sums = loss_by_hand(drafter, shared, batch, mix, **how)
    assert float(outcome.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-7)
    assert set(outcome.numerators) == set(outcome.denominators) == set(numerators)
    for name in numerators:
        assert float(outcome.numerators[name]) == pytest.approx(float(numerators[name].detach()), rel=1e-6), name
        assert float(outcome.denominators[name]) == pytest.approx(denominators[name], rel=1e-6), name
    for name, values in outcome.sums.items():
        assert values.tolist() == pytest.approx(sums[name], rel=1e-5), name
    assert {"ce", "count", *(name for name in mix if name in POINTWISE)} <= set(outcome.sums)
    same_gradients(drafter, outcome.loss, loss, still=still)


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS.model_copy(update={"kl": 0.7, "decay": 1.5, "confidence": 0.3})])
def test_the_loss_equals_a_loop_over_anchors_in_value_and_every_gradient(drafter, target, options) -> None:
    outcome = objective(drafter, shared_of(target), three_rows(), options, F64)
    assert {"ce", "l1", "alpha", "hit", "bce", "count"} <= set(outcome.sums)
    compare(drafter, shared_of(target), three_rows(), options)


@pytest.mark.parametrize("name", [*POINTWISE, "dpace", "e2e_tv", "confidence"])
def test_every_objective_alone_equals_the_loop(drafter, target, name: str) -> None:
    options = mixed(**{name: 0.7}).model_copy(update={"lk_eta": 2.0, "dpace_delta": 0.3, "decay": 2.5})
    idle = ("markov_head.markov_w2",) if name == "confidence" else ("confidence_head",)
    compare(drafter, shared_of(target), three_rows(), options, idle)


EVERYTHING = mixed(ce=0.3, kl=0.5, rkl=0.2, jsd=0.9, tv=0.6, l1=0.4, lk_alpha=0.25, lk_hybrid=0.35, dpace=0.7, e2e_tv=1.1, confidence=0.8)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("dspark", {"rank": 6}),
    "gated": ("dspark", {"rank": 6, "markov_head": "gated"}),
    "rnn": ("dspark", {"rank": 6, "markov_head": "rnn"}),
    "no markov": ("dspark", {"rank": 0}),
    "no confidence": ("dspark", {"rank": 6, "confidence": False}),
    "confidence of h alone": ("dspark", {"rank": 6, "confidence_with_markov": False}),
    "detached": ("dspark", {"rank": 6, "confidence_detach": True}),
    "gated, causal": ("dspark", {"rank": 6, "markov_head": "gated", "block_causal": True}),
    "dflash": ("dflash", {}),
}


@pytest.mark.parametrize("options", [EVERYTHING, mixed(ce=1.0), mixed(e2e_tv=1.0, confidence=0.1), mixed(dpace=1.0)], ids=["all", "ce", "e2e_tv", "dpace"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_equals_the_loop(target, tiny_drafter, head: str, options: DistillSection) -> None:
    kind, more = HEADS[head]
    own = randomised(tiny_drafter(target, draft_tokens=3, layers=1, bigram=0.0, kind=kind, **more))
    compare(own, shared_of(target), three_rows(), options, () if options.confidence else ("confidence_head",))


def test_packed_documents_give_what_their_rows_give(drafter, target) -> None:
    """Two documents in one row, against a row each."""
    apart = batch_of([12, 9], [[5, 6, 10], [5, 7, -1]], 5, 3)
    ids, taps, last = (
        torch.cat([tensor[0, :12], tensor[1, :9]])[None] for tensor in (apart.texts.input_ids, apart.texts.taps, apart.last)
    )
    starts = torch.tensor([[0] * 12 + [12] * 9])
    anchors, keep = torch.tensor([[5, 6, 10, 17, 19]]), torch.ones(1, 5, dtype=torch.bool)
    supervised = torch.arange(21) - starts >= 5
    packed = Batch(Texts(ids, taps, starts), last, Anchors(anchors, keep, slot_mask(supervised, starts, anchors, keep, 3)))
    assert int(packed.anchors.mask.sum()) == int(apart.anchors.mask.sum()) == 3 + 3 + 1 + 3 + 1
    left, right = (objective(drafter, shared_of(target), batch, EVERYTHING, F64) for batch in (packed, apart))
    assert float(left.loss.detach()) == pytest.approx(float(right.loss.detach()), rel=1e-12)
    same_gradients(drafter, left.loss, right.loss, 1e-9)


# --- golden values: a vocabulary so small that the laws are given


def given(q: list[float], p: list[float], label: int, slots: int, count: int) -> tuple[Any, Shared, Batch]:
    """One block of `slots` drafts, the first `count` supervised, all with these laws; any drafter can stand behind it."""
    size = len(p)

    class Stub(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.Parameter(torch.tensor(q, dtype=F64).log().expand(1, 1, slots, size).clone())
            self.bias = torch.nn.Parameter(torch.zeros((), dtype=F64))
            self.config = type("Shape", (), {"kind": "stub", "draft_tokens": slots})()
            self.markov_head = self.selector = None

        def confidence_head(self, hidden: torch.Tensor, embedded: Any) -> torch.Tensor:
            return self.bias.expand(len(hidden))

        def forward(self, *args: Any) -> torch.Tensor:
            return self.h

    eye = torch.eye(size, dtype=F64)
    ids = torch.full((1, slots + 1), label)
    last = torch.tensor(p, dtype=F64).log().expand(1, slots + 1, size)
    position, keep = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    batch = Batch(
        Texts(ids, torch.zeros(1, slots + 1, 1, size, dtype=F64), torch.zeros_like(ids)),
        last,
        Anchors(position, keep, (torch.arange(slots) < count)[None, None]),
    )
    return Stub(), Shared(eye, eye, torch.nn.Identity(), 0), batch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ce", math.log(2)), ("kl", 0.0822829), ("rkl", 0.0871767), ("jsd", 0.0210059), ("tv", 0.2), ("l1", 0.4),
        ("lk_alpha", 0.2231436), ("lk_hybrid", 0.1893209), ("confidence", 0.6931472), ("e2e_tv", 0.2),
    ],
)  # fmt: skip
def test_golden_values_of_two_tokens(name: str, value: float) -> None:
    """p = (.7, .3), q = (.5, .5) (algorithms.md 1.4 and 3.13)."""
    drafter, shared, batch = given([0.5, 0.5], [0.7, 0.3], 0, 1, 1)
    assert float(objective(drafter, shared, batch, mixed(**{name: 1.0}), F64).loss.detach()) == pytest.approx(value, abs=1e-6)


def test_the_divisor_is_the_sum_of_the_weights_of_supervised_slots() -> None:
    """faults.md N4: p (.7, .2, .1), q (.5, .3, .2), weights (1, .779, .607), the third slot masked."""
    drafter, shared, batch = given([0.5, 0.3, 0.2], [0.7, 0.2, 0.1], 0, 3, 2)
    for name, value in (("l1", 0.4), ("tv", 0.2)):
        outcome = objective(drafter, shared, batch, mixed(**{name: 1.0}), F64)
        assert float(outcome.denominators["slots"]) == pytest.approx(1.779, abs=1e-3)
        assert float(outcome.numerators["slots"]) == pytest.approx(value * 1.7788, abs=1e-4)
        assert float(outcome.loss.detach()) == pytest.approx(value, abs=1e-6)
        assert (outcome.sums["alpha"] / outcome.sums["count"])[:2].tolist() == pytest.approx([0.8, 0.8])


def test_the_confidence_label_is_the_overlap_without_gradient() -> None:
    """faults.md N8: label 0.8, itself detached; the loss comes from logits and stays small."""
    drafter, shared, batch = given([0.5, 0.3, 0.2], [0.7, 0.2, 0.1], 0, 1, 1)
    drafter.bias.data.fill_(math.log(4))  # sigmoid 0.8
    outcome = objective(drafter, shared, batch, mixed(confidence=1.0), F64)
    grad_h, grad_bias = torch.autograd.grad(outcome.loss, [drafter.h, drafter.bias], allow_unused=True)
    assert float(grad_bias) == pytest.approx(0, abs=1e-6) and (grad_h is None or not grad_h.any())
    drafter.bias.data.fill_(60.0)
    assert float(objective(drafter, shared, batch, mixed(confidence=1.0), F64).loss.detach()) == pytest.approx(12.0, abs=1e-4)


def test_dpace_weights_of_the_sheet() -> None:
    """delta .5, exp(-CE) (.5, .5): w = (1.3125, .5625)."""
    drafter, shared, batch = given([0.5, 0.5], [0.7, 0.3], 0, 2, 2)
    outcome = objective(drafter, shared, batch, mixed(dpace=1.0), F64)
    assert float(outcome.denominators["dpace"]) == pytest.approx(1.875)
    (grad,) = torch.autograd.grad(outcome.loss, [drafter.h])
    assert (grad[0, 0] * (1.875 + LEAST)).tolist() == [pytest.approx([-0.5 * w, 0.5 * w]) for w in (1.3125, 0.5625)]


# --- identities


def test_dpace_without_smoothing_is_the_gradient_of_the_prefix_probabilities(drafter, target) -> None:
    """delta 0: the gradient of -sum over blocks and j of prod_{i<=j} q_i(x_i) (algorithms.md 3.4)."""
    shared, batch = shared_of(target), three_rows()
    outcome = objective(drafter, shared, batch, mixed(dpace=1.0).model_copy(update={"dpace_delta": 0.0}), F64)
    hidden = drafter(shared, batch.texts, batch.anchors.position)
    ids = batch.texts.input_ids
    total = torch.zeros((), dtype=F64)
    for row, block in batch.anchors.keep.nonzero().tolist():
        anchor, reached = int(batch.anchors.position[row, block]), torch.ones((), dtype=F64)
        for slot in range(int(batch.anchors.mask[row, block].sum())):
            e = drafter.markov_head.markov_w1.weight[ids[row, anchor + slot]]
            z = shared.head @ hidden[row, block, slot] + drafter.markov_head.markov_w2.weight @ e
            reached = reached * z.softmax(-1)[ids[row, anchor + slot + 1]]
            total = total - reached
    same_gradients(drafter, outcome.loss * (outcome.denominators["dpace"] + LEAST), total, 1e-9, ("confidence_head",))


def test_exactly_the_supervised_slots_have_a_gradient_and_the_right_label(drafter, target, monkeypatch) -> None:
    """Prompt x0-x4, answer x5-x7, G=3. Anchor 5: slot 0 -> x6, slot 1 -> x7, slot 2 none. Anchor 6: slot 0 -> x7."""
    shared = shared_of(target)
    batch = batch_of([8], [[5, 6]], 5, 3)
    hidden = torch.randn(1, 2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    monkeypatch.setattr(module, "forward", lambda *args: hidden)
    outcome = objective(drafter, shared, batch, mixed(ce=1.0), F64)
    divisor = 2 + math.exp(-0.25)
    (grad,) = torch.autograd.grad(outcome.loss, [hidden])
    ids = batch.texts.input_ids[0].tolist()
    wanted = {(0, 0): (6, 5), (0, 1): (7, 6), (1, 0): (7, 6)}  # block, slot: label's position, previous token's
    assert {(block, slot) for block in range(2) for slot in range(3) if grad[0, block, slot].any()} == set(wanted)
    for (block, slot), (label, previous) in wanted.items():
        e = drafter.markov_head.markov_w1.weight[ids[previous]]
        z = shared.head @ hidden[0, block, slot] + drafter.markov_head.markov_w2.weight @ e
        wrong = z.softmax(-1) - F.one_hot(torch.tensor(ids[label]), VOCAB)
        expected = (1.0, math.exp(-0.25))[slot] * (wrong @ shared.head) / divisor
        torch.testing.assert_close(grad[0, block, slot], expected.detach(), rtol=1e-6, atol=1e-9)
    assert float(outcome.denominators["slots"]) == pytest.approx(divisor)
    assert outcome.sums["count"].tolist() == [2, 1, 0]


def test_the_teacher_of_draft_j_is_the_state_one_position_before_its_label(drafter, target) -> None:
    shared = shared_of(target)
    batch = batch_of([8], [[5]], 5, 3)
    before = objective(drafter, shared, batch, OPTIONS, F64).sums["alpha"]
    for position, slot in ((4, None), (5, 0), (6, 1), (7, None)):
        last = batch.last.clone()
        last[0, position] += torch.linspace(-2, 2, 32, dtype=torch.float64)
        after = objective(drafter, shared, dataclasses.replace(batch, last=last), OPTIONS, F64).sums["alpha"]
        assert [place for place in range(3) if after[place] != before[place]] == ([] if slot is None else [slot])


@torch.no_grad()
def test_padding_changes_nothing(drafter, target) -> None:
    shared = shared_of(target)
    together = batch_of([8, 17], [[5, 6], [9, 12]], 5, 3)
    texts = dataclasses.replace(together.texts, taps=together.texts.taps.clone())
    poisoned = dataclasses.replace(together, texts=texts, last=together.last.clone())
    poisoned.texts.taps[0, 8:], poisoned.last[0, 8:] = 1e6, 1e6
    a, b = (objective(drafter, shared, batch, EVERYTHING, F64) for batch in (poisoned, together))
    assert torch.equal(a.loss, b.loss)


def test_numerators_and_denominators_of_rows_add_up_whatever_their_prompts(drafter, target) -> None:
    """Two rows with four supervised tokens each, prompts of 10 and 100: equal weight per supervised slot."""
    shared = shared_of(target)
    generator = torch.Generator().manual_seed(3)
    rows = []
    for prompt in (10, 100):
        row = batch_of([prompt + 4], [[prompt, prompt + 1]], prompt, 3, seed=prompt)
        rows.append(row)
    outcomes = [objective(drafter, shared, row, OPTIONS, F64) for row in rows]
    divisors = [float(outcome.denominators["slots"]) for outcome in outcomes]
    assert divisors[0] == divisors[1] == pytest.approx(2 * (1 + math.exp(-0.25)) + math.exp(-0.5))
    pad = 104 - 14

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        filler = torch.randn(1, pad, *tensor.shape[2:], generator=generator).to(tensor.dtype).abs()
        return torch.cat([tensor, filler], 1)

    ids = torch.cat([wide(rows[0].texts.input_ids), rows[1].texts.input_ids])
    both = Batch(
        Texts(ids, torch.cat([wide(rows[0].texts.taps), rows[1].texts.taps]), torch.zeros_like(ids)),
        torch.cat([wide(rows[0].last), rows[1].last]),
        Anchors(*(torch.cat([getattr(row.anchors, name) for row in rows]) for name in ("position", "keep", "mask"))),
    )
    together = objective(drafter, shared, both, OPTIONS, F64)
    for name in ("slots", "confidence"):
        for values in ("numerators", "denominators"):
            parts = [float(getattr(outcome, values)[name]) for outcome in outcomes]
            assert float(getattr(together, values)[name]) == pytest.approx(sum(parts))
    total = sum(outcome.loss * (divisor + LEAST) for outcome, divisor in zip(outcomes, divisors, strict=True))
    same_gradients(drafter, together.loss * (sum(divisors) + LEAST), total, 1e-7)


@pytest.mark.parametrize("options", [OPTIONS, EVERYTHING], ids=["dspark", "all"])
def test_a_batch_without_a_supervised_slot_is_zero_with_a_graph(drafter, target, options) -> None:
    outcome = objective(drafter, shared_of(target), batch_of([8], [[-1, -1]], 5, 3), options, F64)
    assert float(outcome.loss.detach()) == 0 and not outcome.sums["count"].any()
    for values in (outcome.numerators, outcome.denominators):
        assert set(values) >= {"slots", "confidence"} and not any(float(value) for value in values.values())
    outcome.loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


@torch.no_grad()
def test_drawn_slots_estimate_both_sums_without_bias(drafter, target, monkeypatch) -> None:
    shared = shared_of(target)
    batch = batch_of([30, 24], [list(range(6, 22, 2)), list(range(5, 21, 2))], 5, 3)
    options = OPTIONS.model_copy(update={"decay": 1.5})
    hidden = drafter(shared, batch.texts, batch.anchors.position)
    monkeypatch.setattr(module, "forward", lambda *args: hidden)  # does not hang on the draw
    exact = objective(drafter, shared, batch, options, F64)
    drawn = options.model_copy(update={"slot_sampling": True})
    numerators, denominators = [], []
    for seed in range(250):
        outcome = objective(drafter, shared, batch, drawn, F64, torch.Generator().manual_seed(seed))
        numerators.append(sum(float(value) for value in outcome.numerators.values()))
        denominators.append(float(outcome.denominators["slots"]))
        assert outcome.sums["count"][0] == 16  # the first slot is always kept
    for values, truth in ((numerators, sum(exact.numerators.values())), (denominators, exact.denominators["slots"])):
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std() / math.sqrt(len(found)))
        assert error > 0 and abs(float(found.mean()) - float(truth)) < 3.5 * error
    assert max(denominators) < 48  # of all slots


def test_drawn_slots_depend_on_the_generator_alone(drafter, target) -> None:
    shared, batch = shared_of(target), batch_of([12], [[5, 6, 7]], 5, 3)
    options = OPTIONS.model_copy(update={"slot_sampling": True, "decay": 1.0})
    first, again = (objective(drafter, shared, batch, options, F64, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first.loss, again.loss)


def digest(target: Target) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("trainable", [False, True])
def test_the_target_neither_changes_nor_lends_its_head_a_gradient(tiny_target, tiny_drafter, trainable: bool) -> None:
    target = tiny_target(markov=1.0)
    drafter = tiny_drafter(target, draft_tokens=3, bigram=0.0, rank=6).requires_grad_(True)
    for parameter in target.model.parameters():
        parameter.requires_grad_(trainable)  # set by mistake
    before, own = digest(target), [parameter.detach().clone() for parameter in drafter.parameters()]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    assert not any("embed_tokens" in name or "lm_head" in name for name, _ in drafter.named_parameters())
    batch = batch_of([12, 10], [[5, 6], [5, 7]], 5, 3, torch.float32)
    for _ in range(3):
        objective(drafter, shared_of(target), batch, OPTIONS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digest(target) == before
    assert target.head.weight.grad is None and target.final_norm.weight.grad is None
    moved = [not torch.equal(a, b) for a, b in zip(own, drafter.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("detach", [False, True])
def test_the_confidence_loss_reaches_the_trunk_only_where_asked(target, tiny_drafter, detach: bool) -> None:
    drafter = randomised(tiny_drafter(target, draft_tokens=3, layers=2, bigram=0.0, rank=6, confidence_detach=detach))
    objective(drafter, shared_of(target), batch_of([12], [[5, 6]], 5, 3), mixed(confidence=1.0), F64).loss.backward()
    trunk = [p.grad for name, p in drafter.named_parameters() if not name.startswith("confidence_head")]
    assert all(grad is None or not grad.any() for grad in trunk) is detach
    assert drafter.confidence_head.proj.weight.grad.any()


def test_half_precision_products_keep_float32_losses_and_gradients(tiny_target, tiny_drafter) -> None:
    target = tiny_target(markov=1.0, spread=0.3)
    drafter = tiny_drafter(target, draft_tokens=3, bigram=0.0, rank=6).requires_grad_(True)
    batch = batch_of([12, 17], [[5, 6, 9], [5, 11, 15]], 5, 3, torch.float32)
    exact, half = (objective(drafter, shared_of(target), batch, OPTIONS, kind) for kind in (torch.float32, torch.bfloat16))
    assert half.loss.dtype == torch.float32
    assert float(half.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.02)
    for (name, parameter), a, b in zip(
        drafter.named_parameters(),
        torch.autograd.grad(half.loss, list(drafter.parameters())),
        torch.autograd.grad(exact.loss, list(drafter.parameters())),
        strict=True,
    ):
        assert a.dtype == parameter.dtype == torch.float32
        assert float((a - b).norm()) < 0.1 * float(b.norm()) + 1e-4, name


def test_slot_statistics_are_the_overlap_and_hits_of_every_slot(drafter, target) -> None:
    shared = shared_of(target)
    batch = three_rows()
    alpha, hit = slot_statistics(drafter, shared, batch, F64, 4)
    *_, sums = loss_by_hand(drafter, shared, batch, {"ce": 1.0})
    assert alpha.sum((0, 1)).tolist() == pytest.approx(sums["alpha"], rel=1e-5)
    assert hit.sum((0, 1)).tolist() == sums["hit"]
    assert not alpha[~batch.anchors.mask].any() and not hit[~batch.anchors.mask].any()


def test_a_mix_that_says_nothing_of_this_drafter_is_refused(target, tiny_drafter) -> None:
    drafter = tiny_drafter(target, kind="dflash", draft_tokens=3)
    batch = batch_of([12], [[5, 6]], 5, 3)
    with pytest.raises(ValueError, match="nothing to minimise for a dflash drafter"):
        objective(drafter, shared_of(target), batch, DistillSection(ce=0.0, confidence=1.0), torch.float64)
