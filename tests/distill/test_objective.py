"""DSpark's objective against a plain loop over anchors; what a block sees; what never trains.

Legend: B rows, T tokens, N anchors, G draft tokens, K taps, D hidden size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specgraft.config import DistillSection
from specgraft.distill import offpolicy
from specgraft.distill.anchors import Anchors, slot_mask
from specgraft.distill.offpolicy import Batch, block_hidden, dspark_loss, slot_weights
from specgraft.distill.statistics import slot_statistics
from specgraft.drafters.dspark import DSpark
from specgraft.drafters.layers import rope_tables
from specgraft.drafters.shared import Shared
from specgraft.targets.model import Target

VOCAB = 64
OPTIONS = DistillSection(chunk_rows=5)


def shared_of(target: Target) -> Shared:
    return Shared(target.embedding.weight, target.head.weight, target.final_norm, 0)


def batch_of(
    lengths: list[int], anchors: list[list[int]], prompt: int, draft_tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Batch:
    """Random rows of these lengths, supervised behind `prompt` tokens, with these anchors (padded by -1)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    loss_mask = inside & (torch.arange(longest) >= prompt)
    position = torch.tensor(anchors)
    keep = position >= 0
    position = position.clamp(min=0)
    return Batch(
        input_ids=ids * inside,
        lengths=torch.tensor(lengths),
        taps=torch.randn(len(lengths), longest, 3, 32, generator=generator, dtype=torch.float64).to(dtype),
        last=3 * torch.randn(len(lengths), longest, 32, generator=generator, dtype=torch.float64).to(dtype),
        anchors=Anchors(position, keep, slot_mask(loss_mask, position, keep, draft_tokens)),
    )


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return tiny_target(dtype=torch.float64, markov=1.0, spread=0.3)


@pytest.fixture
def drafter(target, tiny_drafter) -> DSpark:
    """Float64, three drafts, every weight random, norms not one."""
    drafter = tiny_drafter(target, draft_tokens=3, layers=2, bigram=0.0, rank=6)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in drafter.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data = centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return drafter.requires_grad_(True).train()


# the definition: one anchor at a time, one draft at a time, nothing shared but the weights


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Rotary embedding of x [S,H,d] at these positions."""
    cos, sin = rope_tables(torch.tensor(positions), x.shape[-1], 10_000.0)
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]


def block_by_hand(drafter: DSpark, shared: Shared, ids: list[int], taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """h [G,D] of one block: it is given the taps before the anchor and the anchor's token, so it can see nothing else."""
    c, w = drafter.config, dict(drafter.named_parameters())
    context = norm(taps[:anchor].flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = shared.embedding[torch.tensor([ids[anchor]] + [shared.mask_token_id] * (c.draft_tokens - 1))]
    slots = [anchor + slot for slot in range(c.draft_tokens)]  # slot j-1 sits at the position of its predecessor
    for index in range(c.layers):
        at = f"layers.{index}."
        y = norm(x, w[at + "input_layernorm.weight"])
        both = torch.cat([context, y])
        places = [*range(anchor), *slots]
        q = turned(norm((y @ w[at + "self_attn.q_proj.weight"].T).view(-1, c.heads, c.head_dim), w[at + "self_attn.q_norm.weight"]), slots)
        k = (both @ w[at + "self_attn.k_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        k = turned(norm(k, w[at + "self_attn.k_norm.weight"]), places)
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        heads = []
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(c.head_dim)
            heads.append(scores.softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gate @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


def loss_by_hand(drafter: DSpark, shared: Shared, batch: Batch, options: DistillSection) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Numerator with graph, denominator, and sums per slot."""
    w = dict(drafter.named_parameters())
    decay = slot_weights(drafter.config.draft_tokens, options.decay)  # float32, as are its products
    weights, w_ce, w_l1, w_kl = (part.tolist() for part in (decay, options.ce * decay, options.l1 * decay, options.kl * decay))
    numerator, denominator = torch.zeros((), dtype=torch.float64), 0.0
    sums: dict[str, Any] = {name: [0.0] * drafter.config.draft_tokens for name in ("ce", "l1", "kl", "alpha", "hit", "bce", "count")}
    for row in range(len(batch.lengths)):
        length = int(batch.lengths[row])
        ids = batch.input_ids[row, :length].tolist()
        for place, anchor in enumerate(batch.anchors.position[row].tolist()):
            if not batch.anchors.keep[row, place]:
                continue
            hidden = block_by_hand(drafter, shared, ids, batch.taps[row, :length], anchor)
            for j in range(1, drafter.config.draft_tokens + 1):
                if not batch.anchors.mask[row, place, j - 1]:
                    break
                e = w["markov_head.markov_w1.weight"][ids[anchor + j - 1]]
                z = shared.head @ hidden[j - 1] + w["markov_head.markov_w2.weight"] @ e
                p = (shared.head @ shared.final_norm(batch.last[row, anchor + j - 1])).softmax(-1).detach()
                q = z.softmax(-1)
                ce = -z.log_softmax(-1)[ids[anchor + j]]
                l1 = (p - q).abs().sum()
                kl = (p * (p.log() - z.log_softmax(-1))).sum()
                alpha = torch.minimum(p, q).sum().detach()
                c = w["confidence_head.proj.weight"][0] @ torch.cat([hidden[j - 1], e]) + w["confidence_head.proj.bias"][0]
                bce = -(alpha * F.logsigmoid(c) + (1 - alpha) * F.logsigmoid(-c))
                weight = weights[j - 1]
                numerator = numerator + w_ce[j - 1] * ce + w_l1[j - 1] * l1 + w_kl[j - 1] * kl + options.confidence * weight * bce
                denominator += weight
                hit = float(z.argmax() == p.argmax())
                found = {"ce": ce, "l1": l1, "kl": kl, "alpha": alpha, "hit": hit, "bce": bce, "count": 1.0}
                for name, value in found.items():
                    sums[name][j - 1] += float(value.detach()) if isinstance(value, torch.Tensor) else value
    return numerator, denominator, sums


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS.model_copy(update={"kl": 0.7, "decay": 1.5, "confidence": 0.3})])
def test_the_loss_equals_a_loop_over_anchors_in_value_and_every_gradient(drafter, target, options) -> None:
    shared = shared_of(target)
    batch = batch_of([12, 17, 9], [[5, 6, 9], [5, 11, 15], [7, -1, -1]], 5, 3)
    outcome = dspark_loss(drafter, shared, batch, options, torch.float64)
    numerator, denominator, sums = loss_by_hand(drafter, shared, batch, options)
    assert float(outcome.numerator.detach()) == pytest.approx(float(numerator.detach()), rel=1e-9)
    assert float(outcome.denominator) == pytest.approx(denominator, rel=1e-6)
    for name, values in sums.items():
        assert outcome.sums[name].tolist() == pytest.approx(values, rel=1e-6), name
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    found = torch.autograd.grad(outcome.numerator, parameters)
    expected = torch.autograd.grad(numerator, parameters)
    for name, a, b in zip(names, found, expected, strict=True):
        assert float(b.abs().max()) > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_exactly_the_supervised_slots_have_a_gradient_and_the_right_label(drafter, target, monkeypatch) -> None:
    """Prompt x0-x4, answer x5-x7, G=3. Anchor 5: slot 0 -> x6, slot 1 -> x7, slot 2 none. Anchor 6: slot 0 -> x7."""
    shared = shared_of(target)
    batch = batch_of([8], [[5, 6]], 5, 3)
    hidden = torch.randn(1, 2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    monkeypatch.setattr(offpolicy, "block_hidden", lambda *args: hidden)
    options = OPTIONS.model_copy(update={"ce": 1.0, "l1": 0.0, "confidence": 0.0})
    outcome = dspark_loss(drafter, shared, batch, options, torch.float64)
    (grad,) = torch.autograd.grad(outcome.numerator, [hidden])
    ids = batch.input_ids[0].tolist()
    wanted = {(0, 0): (6, 5), (0, 1): (7, 6), (1, 0): (7, 6)}  # block, slot: label's position, previous token's
    assert {(block, slot) for block in range(2) for slot in range(3) if grad[0, block, slot].any()} == set(wanted)
    for (block, slot), (label, previous) in wanted.items():
        e = drafter.markov_head.markov_w1.weight[ids[previous]]
        z = shared.head @ hidden[0, block, slot] + drafter.markov_head.markov_w2.weight @ e
        wrong = z.softmax(-1) - F.one_hot(torch.tensor(ids[label]), VOCAB)
        expected = (1.0, math.exp(-0.25))[slot] * (wrong @ shared.head)
        torch.testing.assert_close(grad[0, block, slot], expected.detach(), rtol=1e-6, atol=1e-9)
    assert float(outcome.denominator) == pytest.approx(2 + math.exp(-0.25))
    assert outcome.sums["count"].tolist() == [2, 1, 0]


def test_the_teacher_of_draft_j_is_the_state_one_position_before_its_label(drafter, target) -> None:
    shared = shared_of(target)
    batch = batch_of([8], [[5]], 5, 3)
    before = dspark_loss(drafter, shared, batch, OPTIONS, torch.float64).sums["alpha"]
    for position, slot in ((4, None), (5, 0), (6, 1), (7, None)):
        last = batch.last.clone()
        last[0, position] += torch.linspace(-2, 2, 32, dtype=torch.float64)
        after = dspark_loss(drafter, shared, dataclasses.replace(batch, last=last), OPTIONS, torch.float64).sums["alpha"]
        assert [place for place in range(3) if after[place] != before[place]] == ([] if slot is None else [slot])


@pytest.fixture
def eight(target, tiny_target, tiny_drafter):
    """A float32 drafter of eight drafts with random weights, and a batch with the overlapping blocks 4 and 6."""
    target = tiny_target(markov=1.0, spread=0.3)
    drafter = tiny_drafter(target, draft_tokens=8, layers=2, bigram=0.0, rank=6)
    generator = torch.Generator().manual_seed(7)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter, shared_of(target), batch_of([16], [[4, 6]], 2, 8, torch.float32)


@torch.no_grad()
def test_a_block_never_sees_states_at_its_anchor_or_behind(eight) -> None:
    drafter, shared, batch = eight
    before = block_hidden(drafter, shared, batch)[0]
    for position, moved in ((3, [True, True]), (4, [False, True]), (5, [False, True]), (6, [False, False]), (9, [False, False])):
        taps = batch.taps.clone()
        taps[0, position] += 1.0
        after = block_hidden(drafter, shared, dataclasses.replace(batch, taps=taps))[0]
        for block in range(2):
            assert torch.equal(after[block], before[block]) is not moved[block], (position, block)
            if moved[block]:
                assert (after[block] != before[block]).any(-1).all()  # every slot reads the context


@torch.no_grad()
def test_a_block_reads_no_token_but_its_anchor(eight) -> None:
    drafter, shared, batch = eight
    before = block_hidden(drafter, shared, batch)[0]
    for position in range(16):
        ids = batch.input_ids.clone()
        ids[0, position] = ids[0, position] % (VOCAB - 1) + 1
        after = block_hidden(drafter, shared, dataclasses.replace(batch, input_ids=ids))[0]
        for block, anchor in enumerate((4, 6)):
            assert torch.equal(after[block], before[block]) is (anchor != position)
            if anchor == position:
                assert (after[block] != before[block]).any(-1).all()


@torch.no_grad()
def test_slots_see_each_other_in_both_directions_and_no_other_block(eight) -> None:
    drafter, _, batch = eight
    layer = drafter.layers[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 8, 32, generator=generator)
    steps = torch.arange(16)
    context = drafter.context(batch.taps, steps[None])[0]
    visible = steps < batch.anchors.position[..., None]
    cos, sin = rope_tables(batch.anchors.position[..., None] + torch.arange(8), 8, 10_000.0)
    before = layer(x, context, visible, cos, sin)
    for slot in range(8):
        other = x.clone()
        other[0, 1, slot] += torch.randn(32, generator=generator)
        after = layer(other, context, visible, cos, sin)
        assert torch.equal(after[0, 0], before[0, 0])
        assert (after[0, 1] != before[0, 1]).any(-1).all()  # slot 2 moves with slot 3, and slot 3 with slot 2


@torch.no_grad()
def test_padding_and_other_rows_change_nothing(drafter, target) -> None:
    shared = shared_of(target)
    together = batch_of([8, 17], [[5, 6], [9, 12]], 5, 3)
    alone = Batch(
        together.input_ids[:1, :8], together.lengths[:1], together.taps[:1, :8], together.last[:1, :8],
        Anchors(*(getattr(together.anchors, name)[:1] for name in ("position", "keep", "mask"))),
    )  # fmt: skip
    torch.testing.assert_close(
        block_hidden(drafter, shared, together)[:1], block_hidden(drafter, shared, alone), rtol=1e-12, atol=1e-12
    )
    poisoned = dataclasses.replace(together, taps=together.taps.clone(), last=together.last.clone())
    poisoned.taps[0, 8:], poisoned.last[0, 8:] = 1e6, 1e6
    assert torch.equal(block_hidden(drafter, shared, poisoned)[0], block_hidden(drafter, shared, together)[0])
    a, b = (dspark_loss(drafter, shared, batch, OPTIONS, torch.float64) for batch in (poisoned, together))
    assert torch.equal(a.numerator, b.numerator)


def test_numerators_and_denominators_of_rows_add_up_whatever_their_prompts(drafter, target) -> None:
    """Two rows with four supervised tokens each, prompts of 10 and 100: equal weight per supervised slot."""
    shared = shared_of(target)
    generator = torch.Generator().manual_seed(3)
    rows = []
    for prompt in (10, 100):
        row = batch_of([prompt + 4], [[prompt, prompt + 1]], prompt, 3, seed=prompt)
        rows.append(row)
    outcomes = [dspark_loss(drafter, shared, row, OPTIONS, torch.float64) for row in rows]
    assert float(outcomes[0].denominator) == float(outcomes[1].denominator) == pytest.approx(2 * (1 + math.exp(-0.25)) + math.exp(-0.5))
    pad = 104 - 14

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        filler = torch.randn(1, pad, *tensor.shape[2:], generator=generator).to(tensor.dtype).abs()
        return torch.cat([tensor, filler], 1)

    both = Batch(
        torch.cat([wide(rows[0].input_ids), rows[1].input_ids]),
        torch.cat([row.lengths for row in rows]),
        torch.cat([wide(rows[0].taps), rows[1].taps]),
        torch.cat([wide(rows[0].last), rows[1].last]),
        Anchors(*(torch.cat([getattr(row.anchors, name) for row in rows]) for name in ("position", "keep", "mask"))),
    )
    together = dspark_loss(drafter, shared, both, OPTIONS, torch.float64)
    assert float(together.denominator) == pytest.approx(sum(float(outcome.denominator) for outcome in outcomes))
    total = outcomes[0].numerator + outcomes[1].numerator
    parameters = list(drafter.parameters())
    for a, b in zip(torch.autograd.grad(together.numerator, parameters), torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_batch_without_a_supervised_slot_is_zero_with_a_graph(drafter, target) -> None:
    outcome = dspark_loss(drafter, shared_of(target), batch_of([8], [[-1, -1]], 5, 3), OPTIONS, torch.float64)
    assert float(outcome.numerator.detach()) == float(outcome.denominator) == 0 and outcome.sums == {}
    outcome.numerator.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_decay_weights_are_the_published_ones() -> None:
    published = [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]
    assert slot_weights(7, 4.0).tolist() == pytest.approx(published, abs=5e-4)
    assert slot_weights(3, 1.0).tolist() == pytest.approx([1, math.exp(-1), math.exp(-2)])


@torch.no_grad()
def test_drawn_slots_estimate_both_sums_without_bias(drafter, target) -> None:
    shared = shared_of(target)
    batch = batch_of([30, 24], [list(range(6, 22, 2)), list(range(5, 21, 2))], 5, 3)
    options = OPTIONS.model_copy(update={"decay": 1.5})
    exact = dspark_loss(drafter, shared, batch, options, torch.float64)
    drawn = options.model_copy(update={"slot_sampling": True})
    numerators, denominators = [], []
    for seed in range(250):
        outcome = dspark_loss(drafter, shared, batch, drawn, torch.float64, torch.Generator().manual_seed(seed))
        numerators.append(float(outcome.numerator))
        denominators.append(float(outcome.denominator))
        assert outcome.sums["count"][0] == 16  # the first slot is always kept
    for values, truth in ((numerators, exact.numerator), (denominators, exact.denominator)):
        found = torch.tensor(values, dtype=torch.float64)
        error = float(found.std() / math.sqrt(len(found)))
        assert error > 0 and abs(float(found.mean()) - float(truth)) < 3.5 * error
    assert max(denominators) < 48  # of all slots


def test_drawn_slots_depend_on_the_generator_alone(drafter, target) -> None:
    shared, batch = shared_of(target), batch_of([12], [[5, 6, 7]], 5, 3)
    options = OPTIONS.model_copy(update={"slot_sampling": True, "decay": 1.0})
    first, again = (dspark_loss(drafter, shared, batch, options, torch.float64, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first.numerator, again.numerator)


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
        outcome = dspark_loss(drafter, shared_of(target), batch, OPTIONS)
        (outcome.numerator / outcome.denominator).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digest(target) == before
    assert target.head.weight.grad is None and target.final_norm.weight.grad is None
    moved = [not torch.equal(a, b) for a, b in zip(own, drafter.parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("detach", [False, True])
def test_the_confidence_loss_reaches_the_trunk_only_where_asked(target, drafter, detach: bool) -> None:
    drafter.config = dataclasses.replace(drafter.config, confidence_detach=detach)
    options = OPTIONS.model_copy(update={"ce": 0.0, "l1": 0.0})
    dspark_loss(drafter, shared_of(target), batch_of([12], [[5, 6]], 5, 3), options, torch.float64).numerator.backward()
    trunk = [p.grad for name, p in drafter.named_parameters() if not name.startswith("confidence_head")]
    assert all(grad is None or not grad.any() for grad in trunk) is detach
    assert drafter.confidence_head.proj.weight.grad.any()


def test_half_precision_products_keep_float32_losses_and_gradients(tiny_target, tiny_drafter) -> None:
    target = tiny_target(markov=1.0, spread=0.3)
    drafter = tiny_drafter(target, draft_tokens=3, bigram=0.0, rank=6).requires_grad_(True)
    batch = batch_of([12, 17], [[5, 6, 9], [5, 11, 15]], 5, 3, torch.float32)
    exact, half = (dspark_loss(drafter, shared_of(target), batch, OPTIONS, kind) for kind in (torch.float32, torch.bfloat16))
    assert half.numerator.dtype == torch.float32
    assert float(half.numerator.detach()) == pytest.approx(float(exact.numerator.detach()), rel=0.02)
    for (name, parameter), a, b in zip(
        drafter.named_parameters(),
        torch.autograd.grad(half.numerator, list(drafter.parameters())),
        torch.autograd.grad(exact.numerator, list(drafter.parameters())),
        strict=True,
    ):
        assert a.dtype == parameter.dtype == torch.float32
        assert float((a - b).norm()) < 0.1 * float(b.norm()) + 1e-4, name


def test_slot_statistics_are_the_overlap_and_hits_of_every_slot(drafter, target) -> None:
    shared = shared_of(target)
    batch = batch_of([12, 17, 9], [[5, 6, 9], [5, 11, 15], [7, -1, -1]], 5, 3)
    alpha, hit = slot_statistics(drafter, shared, batch, torch.float64, 4)
    _, _, sums = loss_by_hand(drafter, shared, batch, OPTIONS)
    assert alpha.sum((0, 1)).tolist() == pytest.approx(sums["alpha"], rel=1e-5)
    assert hit.sum((0, 1)).tolist() == sums["hit"]
    assert not alpha[~batch.anchors.mask].any() and not hit[~batch.anchors.mask].any()
