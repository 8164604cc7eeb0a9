"""The selector's objectives against a loop over slots; which mixes are refused; a tiny run learns.

Legend: B rows, T tokens, N anchors, G draft tokens, D hidden size.
"""

from __future__ import annotations

import math

import pytest
import torch

from specgraft.config import DistillSection
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.distill.statistics import slot_statistics
from specgraft.distill.weights import decay_weights, dpace_weights
from specgraft.drafters.drafter import Texts
from specgraft.drafters.shared import Shared
from specgraft.targets.generate import Request, generate

F64, G, HIDDEN, VOCAB = torch.float64, 3, 32, 64
SHAPE = {"kind": "dflash2", "conv_group": 8, "selector_rank": 6, "selector_top_k": 5}
UNARY = ("ce", "kl", "rkl", "jsd", "dpace")


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=F64, markov=1.0, spread=0.3)


@pytest.fixture(scope="module")
def shared(target):
    return Shared.of(target, 0)


@pytest.fixture
def drafter(target, tiny_drafter):
    """Float64, three drafts, every weight random."""
    drafter = tiny_drafter(target, draft_tokens=G, layers=1, **SHAPE)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in drafter.named_parameters():
        centre = 1.0 if "norm" in name or "base_kernel" in name else 0.0
        parameter.data = centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=F64)
    return drafter.requires_grad_(True).train()


def anchors_of(position, supervised, draft_tokens=G):
    """Anchors [B,N] (-1: none) of rows supervised in [first, end)."""
    position = torch.tensor(position)
    label = position[..., None] + torch.arange(1, draft_tokens + 1)
    first, end = (torch.tensor(x)[:, None, None] for x in zip(*supervised, strict=True))
    keep = position >= 0
    return Anchors(position.clamp(min=0), keep, keep[..., None] & (label >= first) & (label < end))


def batch_of(drafter, shared, seed=0, dtype=F64):
    """Two rows with seven blocks. Half of the labels are candidates and the target leans to them, as after some training."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (2, 17), generator=generator)
    taps = torch.randn(2, 17, 3, HIDDEN, generator=generator, dtype=F64).to(dtype)
    last = torch.randn(2, 17, HIDDEN, generator=generator, dtype=F64).to(dtype)
    anchors = anchors_of([[5, 6, 9, -1], [5, 11, 13, 15]], [(5, 12), (5, 17)])
    texts = Texts(ids, taps, torch.zeros_like(ids))
    with torch.no_grad():  # states depend on the anchor's token alone: labels behind it may be chosen
        for row, block in ((0, 1), (0, 2), (1, 0), (1, 1)):
            anchor = int(anchors.position[row, block])
            hidden = drafter(shared, texts, anchors.position)[row, block]
            for slot in (0, 2) if block != 1 else (1,):
                if anchors.mask[row, block, slot]:
                    top = (shared.head.to(dtype) @ hidden[slot]).topk(5).indices
                    ids[row, anchor + slot + 1] = top[2]
                    last[row, anchor + slot] = 2 * shared.head[top[1]].to(dtype) + last[row, anchor + slot]
    return Batch(texts, last, anchors)


def by_hand(drafter, shared, batch, options):
    """Loss with graph, numerators, denominators and sums per slot, one slot at a time over the whole vocabulary."""
    w, mix = dict(drafter.named_parameters()), options.weights("dflash2")
    hidden = drafter(shared, batch.texts, batch.anchors.position)
    decay, mask = decay_weights(G, options.decay).tolist(), batch.anchors.mask
    inject = options.injects
    values = {}
    for row, block, slot in mask.nonzero().tolist():
        before = int(batch.anchors.position[row, block]) + slot
        previous, token = batch.texts.input_ids[row, before : before + 2].tolist()
        h = hidden[row, block, slot]
        unary = shared.head @ h
        p = (shared.head @ shared.final_norm(batch.last[row, before])).softmax(-1).detach()
        gate = w["candidate_selector.predecessor_codebook"][previous] * (w["candidate_selector.hidden_projection.weight"] @ h)
        z = unary + w["candidate_selector.successor_codebook"] @ gate
        top = unary.detach().topk(drafter.config.selector_top_k).indices.tolist()
        inside = torch.zeros(VOCAB, dtype=torch.bool)
        inside[top] = True
        q = z.masked_fill(~inside, -math.inf).softmax(-1)
        label = int(p.argmax()) if inject else token
        taught = inside.clone()
        if inject and label not in top:
            taught[top[-1]], taught[label] = False, True
        found = bool(taught[label])
        alpha = torch.minimum(p, q).sum()
        values[row, block, slot] = {
            "ce": -unary.log_softmax(-1)[token],
            "kl": (p * (p.log() - unary.log_softmax(-1))).sum(),
            "selector": -z.masked_fill(~taught, -math.inf).log_softmax(-1)[label] if found else torch.zeros((), dtype=F64),
            "taught": found, "recall": label in top, "picked": int(q.argmax()) == label, "hit": int(q.argmax()) == int(p.argmax()),
            "alpha": alpha, "tv": (p - q).abs().sum() / 2, "l1": (p - q).abs().sum(), "lk_alpha": -alpha.log(), "mass": p[inside].sum(),
        }  # fmt: skip
    numerators, denominators = {}, {}
    ce = torch.tensor([[[float(values[r, b, s]["ce"].detach()) if (r, b, s) in values else 0.0 for s in range(G)] for b in range(4)] for r in range(2)])
    steps = dpace_weights(ce.double(), mask, options.dpace_delta)
    for name, factor in mix.items():
        if name == "confidence":
            continue
        if name == "e2e_tv":
            blocks = sorted({(r, b) for r, b, _ in values})
            losses = []
            for r, b in blocks:
                alphas = torch.stack([values[r, b, s]["alpha"] for s in range(G) if (r, b, s) in values])
                losses.append(1 - alphas.cumprod(0).mean())  # autograd through the products
            part, numerator, denominator = "e2e_tv", factor * torch.stack(losses).sum(), float(len(blocks))
        else:
            slot_weight = {key: float(steps[key]) if name == "dpace" or (name == "selector" and "dpace" in mix) else decay[key[2]] for key in values}
            kept = {key: x for key, x in slot_weight.items() if name != "selector" or values[key]["taught"]}
            part = name if name in ("dpace", "selector") else "slots" if name in UNARY else "overlap"
            loss = "ce" if name == "dpace" else name
            numerator = factor * torch.stack([weight * values[key][loss] for key, weight in kept.items()]).sum()
            denominator = sum(kept.values())
        numerators[part] = numerators.get(part, 0.0) + numerator
        denominators[part] = denominator
    loss = sum(numerators[part] / (denominators[part] + 1e-6) for part in numerators)
    sums = {
        name: [sum(float(torch.as_tensor(v[name]).detach()) for (_, _, s), v in values.items() if s == slot) for slot in range(G)]
        for name in next(iter(values.values()))
    }
    for name, flag in (("oracle", "recall"), ("path", "picked")):
        sums[name] = [sum(all(values[r, b, i][flag] for i in range(s + 1)) for r, b, s in values if s == slot) for slot in range(G)]
    return loss, numerators, denominators, sums, values


MIXES = {
    "NeMo": {"preset": "dflash2"},
    "speculators": {"preset": "dflash2_kl", "selector_missing": "inject"},
    "inject without another target loss": {"preset": "dflash2", "selector_missing": "inject", "decay": 1.5},
    "end to end": {"preset": "e2e_tv", "selector": 0.4},
    "every overlap": {"preset": "dflash2", "kl": 0.2, "tv": 0.5, "l1": 0.3, "lk_alpha": 0.7, "e2e_tv": 0.9, "selector": 0.6},
    "D-PACE": {"preset": "dpace", "selector": 0.8, "tv": 0.5},
    "the selector alone": {"preset": "dflash2", "ce": 0.0},
}


@pytest.mark.parametrize("name", MIXES)
def test_the_loss_equals_a_loop_over_slots_in_value_and_every_gradient(drafter, shared, name: str) -> None:
    options = DistillSection(chunk_rows=5, **MIXES[name])
    batch = batch_of(drafter, shared)
    outcome = objective(drafter, shared, batch, options, F64)
    loss, numerators, denominators, sums, values = by_hand(drafter, shared, batch, options)
    assert float(outcome.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    for part, value in numerators.items():
        assert float(outcome.numerators[part]) == pytest.approx(float(value.detach()), rel=1e-6), part
        assert float(outcome.denominators[part]) == pytest.approx(denominators[part], rel=1e-6), part
    told = set(outcome.sums) - {"count"}
    assert {"ce", "picked", "recall", "oracle", "path"} <= told and ("alpha" in told) is (name not in ("NeMo", "the selector alone"))
    for key in told:
        assert outcome.sums[key].tolist() == pytest.approx(sums[key], rel=1e-5, abs=1e-9), key
    assert 0 < sum(v["recall"] for v in values.values()) < len(values)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    found, wanted = torch.autograd.grad(outcome.loss, parameters), torch.autograd.grad(loss, parameters)
    for key, a, b in zip(names, found, wanted, strict=True):
        assert float(b.abs().max()) > 0, key
        close = 1e-6 * float(b.abs().max())  # slot weights are float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=close, msg=lambda text, key=key: f"{key}: {text}")


def test_statistics_are_those_of_the_law_that_drafts(drafter, shared) -> None:
    batch = batch_of(drafter, shared)
    alpha, hit = slot_statistics(drafter, shared, batch, F64, 4)
    *_, values = by_hand(drafter, shared, batch, DistillSection(preset="dflash2"))
    assert int(batch.anchors.mask.sum()) == len(values) and sum(v["hit"] for v in values.values()) > 0
    for key, v in values.items():
        assert float(alpha[key]) == pytest.approx(float(v["alpha"].detach()), rel=1e-5) and bool(hit[key]) is v["hit"]
        assert float(v["alpha"].detach()) <= float(v["mass"]) + 1e-12
    assert not alpha[~batch.anchors.mask].any() and not hit[~batch.anchors.mask].any()


def test_a_slot_without_its_label_teaches_nothing_where_it_is_left_out(drafter, shared, monkeypatch) -> None:
    """Candidate ids carry no gradient, unary scores of candidates do: the trunk learns from the selector's loss."""
    from specgraft.distill import objective as module

    batch = batch_of(drafter, shared)
    hidden = drafter(shared, batch.texts, batch.anchors.position).detach().requires_grad_()
    monkeypatch.setattr(module, "forward", lambda *args: hidden)
    *_, values = by_hand(drafter, shared, batch, DistillSection(preset="dflash2"))
    outcome = objective(drafter, shared, batch, DistillSection(preset="dflash2", ce=0.0), F64)
    (grad,) = torch.autograd.grad(outcome.loss, [hidden])
    assert {tuple(key) for key in grad.any(-1).nonzero().tolist()} == {key for key, v in values.items() if v["taught"]}


def test_what_is_shown_of_the_selector_loss_is_over_the_slots_it_teaches(drafter, shared) -> None:
    batch = batch_of(drafter, shared)
    left_out, injected = (objective(drafter, shared, batch, DistillSection(preset=p), F64).sums for p in ("dflash2", "dflash2_kl"))
    assert torch.equal(left_out["taught"], left_out["recall"]) and float(left_out["taught"].sum()) < float(left_out["count"].sum())
    assert torch.equal(injected["taught"], injected["count"])


def test_drawn_slots_have_no_prefixes_and_weight_one(drafter, shared) -> None:
    batch = batch_of(drafter, shared)
    options = DistillSection(preset="dflash2", slot_sampling=True, decay=1.5)
    outcome = objective(drafter, shared, batch, options, F64, torch.Generator().manual_seed(2))
    assert not {"oracle", "path"} & set(outcome.sums)
    assert float(outcome.denominators["selector"]) == float(outcome.sums["recall"].sum()) > 0


@pytest.mark.parametrize("mix", [{"preset": "dflash2"}, {"preset": "dflash2_kl", "selector_missing": "inject"}, {"preset": "e2e_tv", "tv": 1.0}])
def test_a_batch_without_a_supervised_slot_is_zero_with_a_graph(drafter, shared, mix) -> None:
    batch = batch_of(drafter, shared)
    empty = Batch(batch.texts, batch.last, Anchors(batch.anchors.position, torch.zeros_like(batch.anchors.keep), torch.zeros_like(batch.anchors.mask)))
    outcome = objective(drafter, shared, empty, DistillSection(**mix), F64)
    assert float(outcome.loss.detach()) == 0
    outcome.loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_half_precision_products_keep_float32_losses(tiny_target, tiny_drafter) -> None:
    target = tiny_target(markov=1.0, spread=0.3)
    shared, drafter = Shared.of(target, 0), tiny_drafter(target, draft_tokens=G, layers=1, **SHAPE).requires_grad_(True)
    batch = batch_of(drafter, shared, dtype=torch.float32)
    options = DistillSection(preset="dflash2_kl", selector_missing="inject", tv=0.5)
    exact, half = (objective(drafter, shared, batch, options, kind) for kind in (torch.float32, torch.bfloat16))
    assert half.loss.dtype == torch.float32
    assert float(half.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.03)
    half.loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in drafter.parameters())


def test_mixes_without_sense_are_refused_at_the_start(drafter, shared, target, tiny_drafter) -> None:
    batch = batch_of(drafter, shared)
    with pytest.raises(ValueError, match="lk_hybrid mixes in a KL that is infinite for a selector's law"):
        objective(drafter, shared, batch, DistillSection(preset="lk_hybrid"), F64)
    plain = tiny_drafter(target, draft_tokens=G, layers=1, kind="dflash")
    with pytest.raises(ValueError, match=r'distill\.preset="dflash2": a dflash drafter has no selector'):
        objective(plain, shared, batch, DistillSection(preset="dflash2"), F64)


@pytest.fixture(scope="module")
def lesson(tiny_target):
    """A float32 target with its own greedy answers, eight of twenty tokens."""
    target = tiny_target(markov=8.0, spread=0.2)
    requests = [Request([5, 6, 7 + number], 20) for number in range(8)]
    generate(target, requests, 8)
    ids = torch.tensor([[*request.ids, *request.output, *[0] * (20 - len(request.output))] for request in requests])
    with torch.no_grad():
        step = target.forward(ids, target.cache(8, 23), (0, 1, 2))
    position = [[3, 6, 9, 12, 15] for _ in requests]
    anchors = anchors_of(position, [(3, 3 + len(request.output)) for request in requests], 4)
    texts = Texts(ids, step.taps.clone(), torch.zeros_like(ids))
    return target, Batch(texts, step.last.clone(), anchors)


@pytest.mark.parametrize("mix", [{"preset": "dflash2"}, {"preset": "dflash2_kl", "selector_missing": "inject"}])
def test_a_tiny_run_lowers_the_loss_and_raises_acceptance(lesson, tiny_drafter, mix) -> None:
    target, batch = lesson
    drafter = tiny_drafter(target, layers=1, **{**SHAPE, "selector_rank": 16, "selector_top_k": 6}).requires_grad_(True).train()
    shared, options = Shared.of(target, 0), DistillSection(**mix)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    start = slot_statistics(drafter, shared, batch, torch.float32, 64)
    losses = []
    for _ in range(25):
        outcome = objective(drafter, shared, batch, options)
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(outcome.loss.detach()))
    after = slot_statistics(drafter, shared, batch, torch.float32, 64)
    count = batch.anchors.mask.sum()
    assert losses[-1] < 0.5 * losses[0]
    assert after[0].sum() > 1.2 * start[0].sum()
    assert start[1].sum() / count < 0.2 and after[1].sum() / count > 0.4
    assert drafter.selector.successor_codebook.detach().any()
