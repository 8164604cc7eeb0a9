"""MTP: formulas by hand, what each anchor may see, and the state kept while decoding against the training forward.

Legend: B rows, T tokens, K taps, N anchors, G draft tokens, D hidden size, b rows of a call, W new positions.
"""

from __future__ import annotations

import pytest
import torch

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import FULL, SLIDING
from specgraft.drafters.drafter import Texts
from specgraft.drafters.precision import at_precision
from specgraft.drafters.shared import Shared
from specgraft.drafters.store import load_drafter, save_drafter
from specgraft.ops.sampling import Law, uniforms

F64 = torch.float64
TYPES = {"full": {}, "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 6}}
DOCUMENTS = [[1, 3, 9, 2], [15]]  # lengths of the documents of each row


def scramble(drafter, spread=0.3, seed=3):
    """No parameter keeps a starting value that would hide a fault: zero heads, norms of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = spread * torch.randn(parameter.shape, generator=generator, dtype=F64).to(parameter.dtype)
            parameter.copy_(1 + noise if "norm" in name else noise)
    return drafter


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=F64)


@pytest.fixture(params=TYPES)
def drafter(request, target, tiny_drafter):
    return scramble(tiny_drafter(target, kind="mtp", taps=(0, 2), **TYPES[request.param])).requires_grad_(True)


@pytest.fixture
def shared(target):
    return Shared.of(target, 0)


def texts_of(documents=DOCUMENTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(sum(row) for row in documents)
    ids = torch.randint(2, 64, (len(documents), width), generator=generator)
    taps = torch.randn(len(documents), width, 2, 32, generator=generator, dtype=F64)
    starts = torch.zeros_like(ids)
    for row, lengths in enumerate(documents):
        place = 0
        for length in lengths:
            starts[row, place : place + length] = place
            place += length
    return Texts(ids, taps, starts)


def every(texts):
    return torch.arange(texts.input_ids.shape[1]).expand_as(texts.input_ids)


def norm(x, weight, eps=1e-5):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x):
    """Rotary embedding of x [T,H,d] at positions 0..T-1: channel c goes with c + d/2; angles in float32."""
    half = x.shape[2] // 2
    angle = torch.arange(len(x)).float()[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    left, right = x.split(half, 2)
    product = torch.complex(left, right) * torch.complex(angle.cos(), angle.sin())[:, None]
    return torch.cat([product.real, product.imag], 2)


def by_hand(drafter, shared, ids, taps):
    """h [G,D] at the last token of one document: ids [n+1], taps [n,K,D]. Algorithms.md 2.6 with dense causal attention."""
    c, w = drafter.config, dict(drafter.named_parameters())
    length = len(ids)
    states = norm(taps.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    states = torch.cat([torch.zeros(1, c.hidden_size, dtype=F64), states])
    read = torch.cat([norm(states, w["state_norm.weight"]), norm(shared.embedding[ids], w["token_norm.weight"])], 1)
    x = read @ w["input_proj.weight"].T
    for index, kind in enumerate(c.layer_types):
        p = {name.removeprefix(f"layers.{index}."): value for name, value in w.items()}
        u = norm(x, p["input_layernorm.weight"])
        q, k, v = ((u @ p[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, c.head_dim)) for name in "qkv")
        q, k = norm(q, p["self_attn.q_norm.weight"]), norm(k, p["self_attn.k_norm.weight"])
        q, k = turned(q), turned(k)
        out = []
        for t in range(length):
            seen = [s for s in range(t + 1) if kind == FULL or t - s < c.sliding_window]
            lines = []
            for head in range(c.heads):
                mine = head // (c.heads // c.kv_heads)
                weight = (k[seen, mine] @ q[t, head] / c.head_dim**0.5).softmax(0)
                lines.append(weight @ v[seen, mine])
            out.append(torch.cat(lines))
        x = x + torch.stack(out) @ p["self_attn.o_proj.weight"].T
        u = norm(x, p["post_attention_layernorm.weight"])
        gate, up = u @ p["mlp.gate_proj.weight"].T, u @ p["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ p["mlp.down_proj.weight"].T
    last = norm(x, w["norm.weight"])[-1]
    heads = w["heads.weight"].unflatten(0, (c.draft_tokens, c.hidden_size)) @ last
    return last + heads * heads.sigmoid()


def test_every_anchor_equals_the_formulas_by_hand_on_what_it_may_see(drafter, shared):
    """Values, and gradients of every parameter; the document alone, cut at the anchor, without the anchor's own taps."""
    texts = texts_of()
    found = drafter(shared, texts, every(texts))
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    total = torch.zeros((), dtype=F64)
    for row in range(len(texts.starts)):
        for a, first in enumerate(texts.starts[row].tolist()):
            h = by_hand(drafter, shared, texts.input_ids[row, first : a + 1], texts.taps[row, first:a])
            torch.testing.assert_close(found[row, a], h, rtol=0, atol=1e-9)
            total = total + (weight[row, a] * h).sum()
    parameters = dict(drafter.named_parameters())
    ours = torch.autograd.grad((weight * found).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, ours, torch.autograd.grad(total, list(parameters.values())), strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_packed_documents_are_as_alone(drafter, shared):
    packed = texts_of()
    found = drafter(shared, packed, every(packed))
    for row in range(len(packed.starts)):
        for first in packed.starts[row].unique().tolist():
            own = packed.starts[row] == first
            alone = Texts(packed.input_ids[row, own][None], packed.taps[row, own][None], torch.zeros(1, int(own.sum()), dtype=torch.long))
            torch.testing.assert_close(drafter(shared, alone, every(alone))[0], found[row, own], rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_an_anchor_may_not_see_moves_nothing_bit_for_bit(drafter, shared):
    texts = texts_of()
    before = drafter(shared, texts, every(texts))
    place = torch.arange(15)
    for t in (3, 4, 7, 12, 13):
        first = texts.starts[0, t]
        for what in ("taps", "token"):
            ids, taps = texts.input_ids.clone(), texts.taps.clone()
            if what == "taps":
                taps[0, t] += 1.0
            else:
                ids[0, t] += 1
            after = drafter(shared, Texts(ids, taps, texts.starts), every(texts))
            reads = (place > t) if what == "taps" else (place >= t)
            reads &= texts.starts[0] == first
            moved = (after[0] != before[0]).flatten(1).any(1)
            assert not moved[~reads].any() and torch.equal(after[1], before[1])
            if not drafter.config.sliding_window:
                assert moved[reads].all()
            assert moved[t] == (what == "token") and (what == "token" or t + 1 == 15 or moved[t + 1] == reads[t + 1])


def test_heads_start_as_the_trunks_state_and_still_learn_apart(target, tiny_drafter, shared):
    drafter = tiny_drafter(target, kind="mtp", taps=(0, 2)).requires_grad_(True)
    texts = texts_of()
    h = drafter(shared, texts, every(texts))
    assert h.shape == (2, 15, 4, 32)
    assert torch.equal(h, drafter.encode(shared, texts)[:, :, None].expand_as(h))
    weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    grad = torch.autograd.grad((weight * h).sum(), drafter.heads.weight)[0].view(4, -1)
    assert torch.linalg.matrix_rank(grad) == 4


def state_at(drafter, shared, ids, taps):
    """h [G,D] of the training forward at the last token of ids, whose taps are not there yet."""
    padded = torch.cat([taps[: len(ids) - 1], torch.full_like(taps[:1], 7.0)])
    texts = Texts(torch.tensor([ids]), padded[None], torch.zeros(1, len(ids), dtype=torch.long))
    return drafter(shared, texts, torch.tensor([[len(ids) - 1]]))[0, 0]


@torch.no_grad()
def test_states_kept_while_decoding_are_the_training_forwards(drafter, shared):
    """Ragged rows, refused positions behind every count, rows that are given to other texts."""
    generator = torch.Generator().manual_seed(4)
    cache = DraftCache(drafter, shared, 4, 24)
    texts: dict[int, list[int]] = {}
    taps = {}
    rounds = [  # counts by row; a row that is new to the round starts another text
        ({0: 5, 2: 1, 3: 9}, {0, 2, 3}),
        ({0: 1, 2: 4, 3: 2}, set()),
        ({0: 3, 1: 2, 3: 1}, {1}),  # fresh and continued rows in one call
        ({0: 1, 1: 4, 2: 2, 3: 4}, {2}),
        ({1: 5}, set()),
        ({0: 2, 1: 1, 2: 5, 3: 1}, set()),
    ]
    for number, (counts, new) in enumerate(rounds):
        rows = torch.tensor(sorted(counts))
        width = max(counts.values()) + number % 2  # at times one more than any row keeps
        piece = torch.randn(len(rows), width, 2, 32, generator=generator, dtype=F64)
        tokens = torch.randint(2, 64, (len(rows), width + 1), generator=generator)
        cache.reset(torch.tensor(sorted(new), dtype=torch.long))
        for place, row in enumerate(rows.tolist()):
            if row in new:
                texts[row], taps[row] = [int(tokens[place, 0])], piece[place, :0]
            tokens[place, 0] = texts[row][-1]
            texts[row] += tokens[place, 1 : counts[row] + 1].tolist()
            taps[row] = torch.cat([taps[row], piece[place, : counts[row]]])
        cache.append(piece, tokens, torch.tensor([counts[row] for row in rows.tolist()]), rows)
        for row, ids in texts.items():
            assert int(cache.lengths[row]) == len(ids) - 1 == len(taps[row])
        wanted = torch.stack([state_at(drafter, shared, texts[row], taps[row]) for row in rows.tolist()])
        torch.testing.assert_close(drafter.apply_heads(cache.extra["state"][rows]), wanted, rtol=0, atol=1e-9)
        level = torch.stack([uniforms(0, str(row), 4) for row in rows.tolist()])
        anchors = torch.tensor([texts[row][-1] for row in rows.tolist()])
        drawn = drafter.draft(shared, cache, rows, anchors, [Law(1.0)] * len(rows), level)
        torch.testing.assert_close(drawn.q, (wanted @ shared.head.T).float().softmax(-1), rtol=0, atol=1e-6)
        greedy = drafter.draft(shared, cache, rows, anchors, [Law()] * len(rows))
        assert greedy.q is None and greedy.confidence is None
        assert torch.equal(greedy.tokens, (wanted @ shared.head.T).argmax(-1))


def test_a_full_cache_is_refused(drafter, shared):
    cache = DraftCache(drafter, shared, 1, 5)
    taps, row = torch.randn(1, 4, 2, 32, dtype=F64), torch.tensor([0])
    cache.append(taps, torch.arange(5)[None], torch.tensor([4]), row)
    with pytest.raises(ValueError, match="needs 6 draft cache places and the cache has 5"):
        cache.append(taps[:, :1], torch.tensor([[4, 5]]), torch.tensor([1]), row)


@torch.no_grad()
def test_half_precision_matrices_propose_what_float32_does(tiny_target, tiny_drafter):
    target = tiny_target()
    shared = Shared.of(target, 0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = at_precision(scramble(tiny_drafter(target, kind="mtp", taps=(0, 2)), 0.1), dtype)
        assert drafter.norm.weight.dtype == drafter.state_norm.weight.dtype == torch.float32
        assert drafter.heads.weight.dtype == drafter.input_proj.weight.dtype == dtype
        cache = DraftCache(drafter, shared, 2, 16)
        rows = torch.arange(2)
        generator = torch.Generator().manual_seed(0)
        for counts in ([6, 4], [2, 3]):
            taps = torch.randn(2, max(counts), 2, 32, generator=generator)
            ids = torch.randint(2, 64, (2, max(counts) + 1), generator=generator)
            cache.append(taps, ids, torch.tensor(counts), rows)
        assert cache.extra["state"].dtype == torch.float32
        found.append(cache.extra["state"])
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.02


@torch.no_grad()
def test_half_precision_products_keep_a_float32_state(tiny_target, tiny_drafter):
    """Training in bfloat16: float32 weights under autocast."""
    target = tiny_target()
    shared, drafter = Shared.of(target, 0), scramble(tiny_drafter(target, kind="mtp", taps=(0, 2)), 0.1)
    texts = texts_of()
    texts = Texts(texts.input_ids, texts.taps.bfloat16(), texts.starts)
    exact = drafter(shared, Texts(texts.input_ids, texts.taps.float(), texts.starts), every(texts))
    with torch.autocast("cpu", torch.bfloat16):
        half = drafter(shared, texts, every(texts))
    assert half.dtype == torch.float32
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.02


@torch.no_grad()
def test_what_is_saved_is_loaded(tmp_path, tiny_target, tiny_drafter):
    target = tiny_target()
    drafter = scramble(tiny_drafter(target, kind="mtp", taps=(0, 2), **TYPES["sliding"]))
    save_drafter(tmp_path, drafter)
    again = load_drafter(tmp_path)
    texts = texts_of()
    texts = Texts(texts.input_ids, texts.taps.float(), texts.starts)
    shared = Shared.of(target, 0)
    assert torch.equal(again(shared, texts, every(texts)), drafter(shared, texts, every(texts)))
