"""DFlash2 against a plain loop over slots and channels; what a convolution reads; identity at the start; names on disk.

Legend: B rows, T tokens, N blocks, S slots a block, G draft tokens, D hidden size, k candidates.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.convolution import BlockConvolution
from specgraft.drafters.drafter import Texts
from specgraft.drafters.layers import rope_tables
from specgraft.drafters.precision import at_precision, precision
from specgraft.drafters.selector import Selector
from specgraft.drafters.shared import Shared
from specgraft.drafters.store import load_drafter, save_drafter
from specgraft.ops.block_attention.spans import Spans
from specgraft.ops.sampling import Law, uniforms

F64, G, HIDDEN, GROUP, VOCAB = torch.float64, 3, 32, 8, 64
SHAPE = {"kind": "dflash2", "conv_group": GROUP, "selector_rank": 6, "selector_top_k": 5}


def shaken(drafter, seed=7):
    """Every weight random, norms and direct taps not one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        centre = 1.0 if "norm" in name or "base_kernel" in name else 0.0
        parameter.data = centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return drafter


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=F64, markov=1.0, spread=0.3)


@pytest.fixture
def drafter(target, tiny_drafter):
    return shaken(tiny_drafter(target, draft_tokens=G, layers=2, **SHAPE)).requires_grad_(True)


def texts_of(lengths, seed=0, dtype=F64):
    """One row of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    ids = torch.randint(1, VOCAB, (1, total), generator=generator)
    taps = torch.randn(1, total, 3, HIDDEN, generator=generator, dtype=F64).to(dtype)
    return Texts(ids, taps, starts[None])


# the definition


def convolved(x, u, base, projection, side):
    """x [S,D] by slot, channel and tap; row (side, tap, group) of the projection is the correction of a group."""
    slots, size = x.shape
    groups = size // GROUP
    rows = []
    for slot in range(slots):
        channels = []
        for channel in range(size):
            total = x.new_zeros(())
            for tap in range(2):
                if slot - tap >= 0:
                    row = (side * 2 + tap) * groups + channel // GROUP
                    total = total + (base[side, tap, channel] + projection[row] @ u[slot]) * x[slot - tap, channel]
            channels.append(total)
        rows.append(torch.stack(channels))
    return torch.stack(rows)


def norm(x, weight, eps=1e-5):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x, positions):
    """Rotary embedding of x [S,H,d]."""
    cos, sin = rope_tables(torch.tensor(positions), x.shape[-1], 10_000.0)
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]


def block_by_hand(drafter, shared, ids, taps, anchor):
    """h [G,D] of one block of a document: it is given the taps before its anchor and the anchor's token, no more."""
    c, w = drafter.config, dict(drafter.named_parameters())
    context = norm(taps[:anchor].flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = shared.embedding[torch.tensor([ids[anchor]] + [shared.mask_token_id] * G)]
    slots = [anchor + slot for slot in range(G + 1)]
    for index in range(c.layers):
        at = f"layers.{index}."
        conv = [(w[f"{at}{part}.base_kernel"], w[f"{at}{part}.kernel_projection.weight"]) for part in ("attention_conv", "mlp_conv")]
        u = norm(x, w[at + "input_layernorm.weight"])
        y = convolved(u, u, *conv[0], 0)
        both = torch.cat([context, y])
        q = turned(norm((y @ w[at + "self_attn.q_proj.weight"].T).view(-1, c.heads, c.head_dim), w[at + "self_attn.q_norm.weight"]), slots)
        k = (both @ w[at + "self_attn.k_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        k = turned(norm(k, w[at + "self_attn.k_norm.weight"]), [*range(anchor), *slots])
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        heads = []
        for head in range(c.heads):
            shared_head = head // (c.heads // c.kv_heads)
            scores = q[:, head] @ k[:, shared_head].T / math.sqrt(c.head_dim)
            heads.append(scores.softmax(-1) @ v[:, shared_head])
        x = x + convolved(torch.cat(heads, -1) @ w[at + "self_attn.o_proj.weight"].T, u, *conv[0], 1)
        u = norm(x, w[at + "post_attention_layernorm.weight"])
        y = convolved(u, u, *conv[1], 0)
        gate = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + convolved(gate @ w[at + "mlp.down_proj.weight"].T, u, *conv[1], 1)
    return norm(x, w["norm.weight"])[1:]


def scores_by_hand(drafter, shared, hidden, previous):
    """Z of the candidates of one slot: id -> score; hidden [D]."""
    w = dict(drafter.named_parameters())
    unary = shared.head @ hidden
    gate = w["candidate_selector.predecessor_codebook"][previous] * (w["candidate_selector.hidden_projection.weight"] @ hidden)
    candidates = sorted(range(VOCAB), key=lambda v: -float(unary[v].detach()))[: drafter.config.selector_top_k]
    return {v: unary[v] + gate @ w["candidate_selector.successor_codebook"][v] for v in candidates}


def test_forward_equals_a_loop_over_anchors_in_value_and_every_gradient(drafter, target):
    """Blocks of two documents in one row, some of them overlapping; states and selector scores."""
    shared, texts = Shared.of(target, 0), texts_of([9, 7])
    anchors = torch.tensor([[2, 3, 14]])
    hidden = drafter(shared, texts, anchors)
    previous = texts.input_ids[0, (anchors[0, :, None] + torch.arange(G)).clamp(max=15)]
    logits = drafter.selector.logits((hidden[0] @ shared.head.T).flatten(0, 1), hidden[0].flatten(0, 1), previous.flatten())
    logits = logits.view(3, G, VOCAB)
    generator = torch.Generator().manual_seed(1)
    found = expected = torch.zeros((), dtype=F64)
    for number, anchor in enumerate(anchors[0].tolist()):
        first = int(texts.starts[0, anchor])
        ids, taps = texts.input_ids[0, first:].tolist(), texts.taps[0, first:]
        states = block_by_hand(drafter, shared, ids, taps, anchor - first)
        torch.testing.assert_close(hidden[0, number], states, rtol=0, atol=1e-9)
        for slot in range(G):
            scores = scores_by_hand(drafter, shared, states[slot], int(previous[number, slot]))
            assert set(logits[number, slot].isfinite().nonzero()[:, 0].tolist()) == set(scores)
            for v, score in scores.items():
                torch.testing.assert_close(logits[number, slot, v], score, rtol=0, atol=1e-9)
                weight = torch.randn((), generator=generator, dtype=F64)
                found, expected = found + weight * logits[number, slot, v], expected + weight * score
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    for name, a, b in zip(names, torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        assert float(b.abs().max()) > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_one_convolution_is_the_published_formula():
    """As a flat product over blocks laid end to end, positions counted modulo the block (z-lab, SGLang, speculators)."""
    generator = torch.Generator().manual_seed(0)
    module = BlockConvolution(12, 4).double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=F64)
    u = torch.randn(2, 3, 5, 12, generator=generator, dtype=F64)  # two rows, three blocks of five slots
    flat = u.reshape(-1, 12)
    kernel = (flat @ module.kernel_projection.weight.T).view(-1, 2, 2, 3)  # slot, side, tap, group
    first = (torch.arange(len(flat)) % 5 == 0)[:, None]

    def side(x, number):
        full = module.base_kernel[number] + kernel[:, number].repeat_interleave(4, -1)  # neighbours share a correction
        before = torch.cat([torch.zeros(1, 12, dtype=F64), x[:-1]]).masked_fill(first, 0.0)
        return full[:, 0] * x + full[:, 1] * before

    torch.testing.assert_close(module(u, torch.tanh), side(side(flat, 0).tanh(), 1).view_as(u), rtol=1e-12, atol=1e-12)


def test_dflash_weights_make_exactly_dflash_at_the_start(target, tiny_drafter):
    shared, texts = Shared.of(target, 0), texts_of([12])
    plain, ours = tiny_drafter(target, kind="dflash"), tiny_drafter(target, **SHAPE)
    missing = ours.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("_conv." in name or "candidate_selector." in name for name in missing.missing_keys)
    anchors = torch.tensor([[3, 4, 9]])
    assert torch.equal(plain(shared, texts, anchors), ours(shared, texts, anchors))
    drafts = []
    for drafter in (plain, ours):
        cache = DraftCache(drafter, shared, 1, 12)
        cache.append(texts.taps[:, :8], texts.input_ids[:, :9], torch.tensor([8]), torch.tensor([0]))
        drafts.append(drafter.draft(shared, cache, torch.tensor([0]), texts.input_ids[:, 8], [Law()]).tokens)
    assert torch.equal(*drafts)


@pytest.fixture
def layer(target, tiny_drafter):
    """A float64 layer with its inputs: x [1,2,S,D], context, tables."""
    drafter = shaken(tiny_drafter(target, draft_tokens=7, layers=1, **SHAPE))
    texts = texts_of([20])
    context = drafter.encode(Shared.of(target, 0), texts)[0]
    x = torch.randn(1, 2, 8, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=F64)
    end = torch.tensor([[4, 6]])
    tables = rope_tables(end[..., None] + torch.arange(8), 8, 10_000.0)

    def run(x, causal=False):
        return drafter.layers[0](x, context, Spans(torch.zeros_like(end), end, causal), *tables)[0]

    return drafter.layers[0], x, run


def moved(run, x, slot, causal=False):
    """Slots of both blocks that move when slot `slot` of the second does."""
    other = x.clone()
    other[0, 1, slot] += torch.linspace(-1, 1, HIDDEN, dtype=F64)
    both = (run(other, causal) != run(x, causal)).any(-1)
    assert not both[0].any()  # the other block never
    return both[1].nonzero()[:, 0].tolist()


@torch.no_grad()
def test_a_later_slot_reaches_an_earlier_one_through_attention_only(layer):
    module, x, run = layer
    for slot in range(8):
        assert moved(run, x, slot) == list(range(8))  # slots attend in both directions
        assert moved(run, x, slot, causal=True) == list(range(slot, 8))
    module.self_attn.o_proj.weight.zero_()
    for slot in range(8):  # what is left: a tap before and a tap behind the MLP
        assert moved(run, x, slot) == list(range(slot, min(slot + 3, 8)))
    module.mlp_conv.start()
    for slot in range(8):
        assert moved(run, x, slot) == [slot]


def test_the_walk_draws_from_the_candidates_with_the_training_forwards_law(drafter, target):
    drafter.requires_grad_(False)
    shared, texts = Shared.of(target, 0), texts_of([8])
    cache = DraftCache(drafter, shared, 1, 12)
    for start, count in ((0, 3), (3, 1), (4, 3)):  # the cache grows as rounds commit
        piece = texts.input_ids[:, start : start + count + 1]
        cache.append(texts.taps[:, start : start + count], piece, torch.tensor([count]), torch.tensor([0]))
    level = uniforms(0, "walk", G)[None]
    found = drafter.draft(shared, cache, torch.tensor([0]), texts.input_ids[:, 7], [Law(0.7)], level)
    hidden = drafter(shared, texts, torch.tensor([[7]]))[0, 0]
    previous = int(texts.input_ids[0, 7])
    for slot in range(G):
        scores = scores_by_hand(drafter, shared, hidden[slot], previous)
        law = torch.zeros(VOCAB, dtype=F64)
        law[list(scores)] = (torch.stack(list(scores.values())) / 0.7).softmax(-1)
        torch.testing.assert_close(found.q[0, slot], law.float(), rtol=0, atol=1e-6)
        previous = int(found.tokens[0, slot])
        assert law[previous] > 0
    greedy = drafter.draft(shared, cache, torch.tensor([0]), texts.input_ids[:, 7], [Law()])
    previous = int(texts.input_ids[0, 7])
    for slot in range(G):
        scores = scores_by_hand(drafter, shared, hidden[slot], previous)
        previous = int(greedy.tokens[0, slot])
        assert previous == max(scores, key=lambda v: float(scores[v]))
    assert greedy.q is None


def test_names_and_shapes_are_those_that_engines_load(drafter, tmp_path):
    state = drafter.state_dict()
    own = {name: tuple(tensor.shape) for name, tensor in state.items() if "conv" in name or "selector" in name}
    conv = {".base_kernel": (2, 2, HIDDEN), ".kernel_projection.weight": (2 * 2 * (HIDDEN // GROUP), HIDDEN)}
    assert own == {f"layers.{i}.{part}{name}": shape for i in range(2) for part in ("attention_conv", "mlp_conv") for name, shape in conv.items()} | {
        "candidate_selector.predecessor_codebook": (VOCAB, 6),
        "candidate_selector.successor_codebook": (VOCAB, 6),
        "candidate_selector.hidden_projection.weight": (6, HIDDEN),
    }
    assert drafter.selector is drafter.candidate_selector
    save_drafter(tmp_path, drafter)
    again = load_drafter(tmp_path)
    assert again.config == drafter.config
    assert all(torch.equal(tensor, state[name].float()) for name, tensor in again.state_dict().items())


def test_half_precision_keeps_float32_scores_and_nearly_the_law(tiny_target, tiny_drafter):
    target = tiny_target(markov=1.0, spread=0.3)
    texts, found = texts_of([8], dtype=torch.float32), []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = shaken(tiny_drafter(target, draft_tokens=G, **{**SHAPE, "selector_top_k": VOCAB}))
        at_precision(drafter, dtype)
        assert drafter.layers[0].attention_conv.base_kernel.dtype == drafter.selector.successor_codebook.dtype == dtype
        shared = Shared.of(target, 0)
        cache = DraftCache(drafter, shared, 1, 12)
        cache.append(texts.taps[:, :7].to(dtype), texts.input_ids, torch.tensor([7]), torch.tensor([0]))
        with precision(drafter):
            hidden = drafter.trunk.draft_states(shared, cache, torch.tensor([0]), texts.input_ids[:, 7])[:, 0]
            found.append(drafter.selector.logits(hidden @ shared.head.T, hidden, texts.input_ids[:, 7]))
    assert found[1].dtype == torch.float32
    assert float((found[0].softmax(-1) - found[1].softmax(-1)).abs().sum()) < 0.15


def test_shapes_without_sense_are_refused_by_name(drafter):
    with pytest.raises(ValueError, match="conv_group=5 must divide the hidden size 32"):
        BlockConvolution(32, 5)
    for change, message in (
        ({"selector_top_k": 65}, "selector_top_k=65: must lie in 1 to 64"),
        ({"selector_rank": 0}, "selector_rank=0: must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            Selector(dataclasses.replace(drafter.config, **change))
