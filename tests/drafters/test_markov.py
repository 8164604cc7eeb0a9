"""Sequential heads: the formulas by hand, slots in parallel against the walk one by one, and remembered rows.

Legend: B rows, N blocks, G draft tokens, D hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

import math

import pytest
import torch

from specgraft.drafters.markov import BiasRows, MarkovHead
from specgraft.drafters.precision import at_precision
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import walk
from specgraft.ops.sampling import Law, uniforms

F64 = torch.float64
KINDS = ["vanilla", "gated", "rnn"]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=F64)


@pytest.fixture
def make(target, tiny_drafter):
    def make(kind, rank=6, **more):
        drafter = tiny_drafter(target, bigram=0.0, rank=rank, markov_head=kind, **more)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in drafter.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
        return drafter

    return make


def inputs(*shape, rank=6):
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(*shape, 32, generator=generator, dtype=F64),
        torch.randn(*shape, rank, generator=generator, dtype=F64),
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_those_that_engines_load(make, kind):
    """contracts/sglang.md 2.3; V 64, r 6, D 32."""
    extra = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (6, 38), "gate_proj.bias": (6,)},
        "rnn": {"joint_proj.weight": (18, 44), "joint_proj.bias": (18,)},
    }
    found = {name: tuple(p.shape) for name, p in make(kind).markov_head.named_parameters()}
    assert found == {"markov_w1.weight": (64, 6), "markov_w2.weight": (64, 6), **extra[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_changes_nothing_and_still_learns(target, tiny_drafter, kind):
    head = tiny_drafter(target, bigram=0.0, rank=6, markov_head=kind).markov_head.requires_grad_(True)
    hidden, embedded = inputs(3, 4)
    bias = head.bias(head.latents(hidden, embedded))
    assert bias.shape == (3, 4, 64) and not bias.any()
    assert torch.autograd.grad((bias * torch.randn_like(bias)).sum(), head.markov_w2.weight)[0].any()


def test_an_unknown_head_is_refused(make):
    with pytest.raises(ValueError, match="markov_head='lstm': known are vanilla, gated, rnn"):
        make("lstm")


def test_vanilla_is_the_embedding(make):
    head = make("vanilla").markov_head
    ids = torch.tensor([[3, 9, 3], [0, 63, 7]])
    latent = head.latents(inputs(2, 3)[0], head.embed(ids))
    assert torch.equal(latent, head.markov_w1.weight[ids]) and head.reads_token_only
    torch.testing.assert_close(head.bias(latent), head.markov_w1.weight[ids] @ head.markov_w2.weight.T, rtol=0, atol=1e-12)


def test_gated_is_the_formula_number_by_number(make):
    """sigma(G [h ; e] + b) * e: the hidden state comes first."""
    head = make("gated").markov_head
    hidden, embedded = inputs(2, 3)
    found = head.latents(hidden, embedded)
    weight, bias = head.gate_proj.weight.tolist(), head.gate_proj.bias.tolist()
    for place in ((0, 0), (1, 2)):
        h, e = hidden[place].tolist(), embedded[place].tolist()
        for row in range(6):
            gate = sigmoid(sum(w * x for w, x in zip(weight[row], [*h, *e], strict=True)) + bias[row])
            assert float(found[place][row]) == pytest.approx(gate * e[row], abs=1e-12)
    assert not head.reads_token_only


def test_rnn_is_the_recurrence_number_by_number(make):
    """(g, c, o) = J [s ; e ; h] + b; s' = sigma(g) s + (1 - sigma(g)) tanh(c); latent tanh(o), s before the first slot 0."""
    head = make("rnn").markov_head
    hidden, embedded = inputs(2, 5)
    found = head.latents(hidden, embedded)
    weight, bias = head.joint_proj.weight.tolist(), head.joint_proj.bias.tolist()
    for row in range(2):
        state = [0.0] * 6
        for slot in range(5):
            read = [*state, *embedded[row, slot].tolist(), *hidden[row, slot].tolist()]
            out = [sum(w * x for w, x in zip(line, read, strict=True)) + b for line, b in zip(weight, bias, strict=True)]
            assert found[row, slot].tolist() == pytest.approx([math.tanh(o) for o in out[12:]], abs=1e-12)
            state = [
                sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c) for s, g, c in zip(state, out[:6], out[6:12], strict=True)
            ]


def test_the_rnn_reads_slots_before_and_none_behind(make):
    head = make("rnn").markov_head
    hidden, embedded = inputs(1, 5)
    before = head.latents(hidden, embedded)
    embedded[0, 2] += 1.0
    moved = (head.latents(hidden, embedded) != before)[0].any(1)
    assert moved.tolist() == [False, False, True, True, True]
    torch.testing.assert_close(head.latents(hidden[:, None], embedded[:, None])[:, 0], head.latents(hidden, embedded))


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_is_the_parallel_form_on_the_drafts_it_drew(make, target, kind):
    """Law and confidence of every slot, with the token before it: the anchor, then the drafts."""
    drafter, shared = make(kind), Shared.of(target, 0)
    hidden = inputs(3, 4)[0]
    anchors = torch.tensor([5, 17, 5])
    level = torch.stack([uniforms(0, str(row), 4) for row in range(3)])
    found = walk(drafter, shared, hidden, anchors, [Law(1.0)] * 3, level, BiasRows(drafter.markov_head))
    previous = torch.cat([anchors[:, None], found.tokens[:, :-1]], 1)
    embedded = drafter.markov_head.embed(previous)
    logits = hidden @ shared.head.T + drafter.markov_head.bias(drafter.markov_head.latents(hidden, embedded))
    torch.testing.assert_close(found.q, logits.float().softmax(-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.confidence, drafter.confidence_head(hidden, embedded).float(), rtol=0, atol=1e-5)
    greedy = walk(drafter, shared, hidden, anchors, [Law()] * 3)
    steps = torch.cat([anchors[:, None], greedy.tokens[:, :-1]], 1)
    bias = drafter.markov_head.bias(drafter.markov_head.latents(hidden, drafter.markov_head.embed(steps)))
    assert torch.equal(greedy.tokens, (hidden @ shared.head.T + bias).argmax(-1))


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("rank", [0, 6])
def test_confidence_reads_the_token_before_where_it_should(make, target, rank, with_markov):
    drafter = make("vanilla", rank, confidence_with_markov=with_markov)
    assert (drafter.markov_head is None) == (rank == 0)
    assert drafter.confidence_head.proj.weight.shape == (1, 32 + (rank if with_markov else 0))
    hidden = inputs(2, 4)[0][:1].expand(2, -1, -1)
    sure = walk(drafter, Shared.of(target, 0), hidden, torch.tensor([5, 17]), [Law()] * 2).confidence[:, 0]
    assert (sure[0] != sure[1]) == (rank > 0 and with_markov)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_half_precision_tables_keep_the_states_of_float32(make, kind):
    """The recurrence itself is not rounded; latents are near those of float64."""
    drafter = make(kind)
    hidden, _ = inputs(2, 7)
    previous = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    exact = drafter.markov_head.latents(hidden, drafter.markov_head.embed(previous))
    head: MarkovHead = at_precision(drafter, torch.bfloat16).markov_head
    with torch.autocast("cpu", torch.bfloat16):
        embedded = head.embed(previous)
        found = head.latents(hidden.float(), embedded)
        _, state = head.step(hidden[:, 0].float(), embedded[:, 0], None)
    assert embedded.dtype == torch.bfloat16
    assert state is None if kind == "gated" else state.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 0.05


def test_remembered_rows_are_the_heads_and_forgotten_when_it_changes(make):
    head = make("vanilla").markov_head

    def exact(ids):
        return head.markov_w2(head.markov_w1(ids))

    bias = BiasRows(head, limit=3 * 64 * 4)
    for ids in ([5, 9, 5], [9, 2], [7, 7, 8], [5, 2, 3, 4, 6]):
        ids = torch.tensor(ids)
        torch.testing.assert_close(bias(ids, head.embed(ids)), exact(ids))
        assert len(bias.rows) <= 3
    assert list(bias.rows) == [3, 4, 6]
    ids = torch.tensor([3, 4])
    bias(ids, head.embed(ids)).add_(1.0)  # what the caller does to a row does not stay
    torch.testing.assert_close(bias(ids, head.embed(ids)), exact(ids))
    with torch.no_grad():
        head.markov_w2.weight.mul_(2)
    torch.testing.assert_close(bias(ids, head.embed(ids)), exact(ids))


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_rows_of_other_heads_are_never_remembered(make, kind):
    """Their bias depends on the state as well: equal tokens differ."""
    head = make(kind).markov_head
    bias = BiasRows(head)
    hidden, _ = inputs(2)
    ids = torch.tensor([5, 5])
    latent, _ = head.step(hidden, head.embed(ids), None)
    out = bias(ids, latent)
    assert not bias.rows and not torch.equal(out[0], out[1])
    assert torch.equal(out, head.bias(latent))
