"""Block attention: every path equals the dense definition, values and every gradient; what is hidden moves nothing.

Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import flex_attention

from specgraft.ops.block_attention import naive, two_part
from specgraft.ops.block_attention.choose import PATHS, block_attention, choose
from specgraft.ops.block_attention.pieces import cut
from specgraft.ops.block_attention.spans import Spans

Attend = Callable[..., torch.Tensor]
NAMES = ("query", "context_key", "context_value", "block_key", "block_value")
FAST = ("two_part", "sdpa")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5}
SHAPES = [  # B, N, S, T, H, Hk, d
    (1, 1, 1, 1, 1, 1, 2),
    (2, 3, 5, 7, 3, 3, 6),
    (2, 18, 7, 40, 6, 2, 4),
    (1, 26, 5, 33, 3, 1, 5),
    (2, 19, 7, 64, 3, 3, 4),
    (2, 3, 5, 0, 3, 1, 6),
]


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex in plain PyTorch: tracing it takes a second a shape."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def path(name: str) -> Attend:
    attend: Attend = importlib.import_module(PATHS[name]).block_attention
    return attend


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    batch, blocks, slots, length, heads, key_heads, size = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(batch, blocks, slots, heads, size), *[(batch, length, key_heads, size)] * 2]
    sizes += [(batch, blocks, slots, key_heads, size)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def spans(shape: tuple[int, ...], kind: str, causal: bool, window: int, seed: int = 0) -> Spans:
    """Anchors: sorted; any order; or in documents, the last third padding. Block 0 sees no context."""
    batch, blocks, _, length = shape[:4]
    end = torch.randint(0, length + 1, (batch, blocks), generator=torch.Generator().manual_seed(seed))
    if kind != "unsorted":
        end = end.sort(-1).values
    end[:, 0] = 0
    first = torch.zeros_like(end)
    if kind == "documents":
        first = end // 5 * 5
        end[:, blocks - blocks // 3 :] = 0
        first[:, blocks - blocks // 3 :] = 0
    return Spans(first, end, causal, window)


def gradients(attend: Attend, tensors: list[torch.Tensor], spans: Spans, **options: object) -> list[torch.Tensor]:
    """The output, and the gradients of its product with a fixed random tensor."""
    out = attend(*tensors, spans, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, weight)]


def assert_same(attend: Attend, tensors: list[torch.Tensor], spans: Spans, **options: object) -> None:
    dtype = tensors[0].dtype
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    found, expected = gradients(attend, tensors, spans, **options), gradients(naive.block_attention, tensors, spans)
    assert found[0].dtype == dtype and found[0].shape == tensors[0].shape
    for name, a, b in zip(("output", *NAMES), found, expected, strict=True):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("window", [0, 3, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "documents"])
@pytest.mark.parametrize("name", FAST)
def test_equals_naive_in_value_and_every_gradient(name: str, kind: str, causal: bool, window: int) -> None:
    for number, shape in enumerate(SHAPES):
        rule = spans(shape, kind, causal, window, seed=number)
        for dtype in (torch.float64, torch.float32):
            assert_same(path(name), inputs(shape, dtype, seed=number), rule)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("window", [0, 3, 16])
def test_flex_equals_naive_in_value(causal: bool, window: int) -> None:
    for number, shape in enumerate(SHAPES):
        rule = spans(shape, "documents", causal, window, seed=number)
        tensors = inputs(shape, torch.float32, seed=number)
        with torch.no_grad():
            found, again = (path("flex")(*tensors, rule) for _ in range(2))
            expected = naive.block_attention(*tensors, rule)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found, again) and len(rule.memo) == 1  # the second layer finds the tiles


def test_flex_as_it_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, without a warning; no backward."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    shape = SHAPES[2]
    tensors, rule = inputs(shape, torch.float32), spans(shape, "documents", False, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            path("flex")(*tensors, rule), naive.block_attention(*tensors, rule), rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ValueError, match="flex has no backward on this device"):
        path("flex")(*tensors, rule)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("kind", ["sorted", "unsorted", "documents"])
def test_pieces_change_nothing(kind: str, window: int) -> None:
    shape = (3, 19, 3, 40, 6, 2, 4)
    rule, tensors = spans(shape, kind, False, window), inputs(shape)
    scores = 19 * 18 * 40  # of a row
    for budget in (1, scores // 3, scores, 2 * scores, 10 * scores):
        for keep in (0, 10**9):
            assert_same(two_part.block_attention, tensors, rule, budget=budget, keep=keep)


def test_pieces_cover_what_is_seen_and_little_else() -> None:
    end = torch.arange(16)[None] * 8
    pieces = cut(Spans(torch.zeros_like(end), end), 2, 6, 128, 6 * 4 * 128)
    assert [(p.block, p.block_end, p.low, p.high) for p in pieces] == [(b, b + 4, 0, 8 * b + 24) for b in (0, 4, 8, 12)]
    assert [[h[:2] for h in p.hidden] for p in pieces] == [
        [(8 * b, 8 * b + 24)] for b in (0, 4, 8, 12)
    ]  # among anchors
    pieces = cut(Spans(torch.zeros_like(end), end, window=8), 2, 6, 128, 6 * 4 * 128)
    assert [(p.low, p.high) for p in pieces] == [(1, 24), (25, 56), (57, 88), (89, 120)]
    assert cut(Spans(end, end), 2, 6, 128, 1) == []


@pytest.mark.parametrize("length", [8, 16, 17, 64])
@pytest.mark.parametrize("name", [*FAST, "flex"])
def test_window_edge_is_the_same_at_every_length(name: str, length: int) -> None:
    """L2: window 16; one block a row as in decode, with a different end in each row."""
    shape = (4, 1, 7, length, 3, 1, 16)
    end = torch.tensor([[length], [length // 2], [0], [max(0, length - 1)]])
    rule, tensors = Spans(torch.zeros_like(end), end, window=16), inputs(shape, torch.float32)
    with torch.no_grad():
        found, expected = path(name)(*tensors, rule), naive.block_attention(*tensors, rule)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for o in range(7):  # by the words of the rule: slot o sees [end + o - 15, end), and its block
            seen = slice(max(0, length + o - 15), length)
            key = torch.cat([tensors[1][0, seen, 0], tensors[3][0, 0, :, 0]])
            value = torch.cat([tensors[2][0, seen, 0], tensors[4][0, 0, :, 0]])
            by_hand = (tensors[0][0, 0, o] @ key.T / 4).softmax(-1) @ value
            torch.testing.assert_close(found[0, 0, o], by_hand, rtol=1e-5, atol=1e-5)
    if name in FAST:
        assert_same(path(name), tensors, rule)


@pytest.mark.parametrize("name", PATHS)
def test_a_single_slot_without_context_returns_its_own_value(name: str) -> None:
    tensors = inputs((1, 2, 1, 3, 4, 2, 6))
    with torch.no_grad():
        out = path(name)(*tensors, Spans(torch.full((1, 2), 2), torch.full((1, 2), 2)))
    torch.testing.assert_close(out, tensors[4].detach().repeat_interleave(2, 3), rtol=0, atol=0)


@pytest.mark.parametrize("name", PATHS)
def test_two_keys_by_hand(name: str) -> None:
    """One context token and one slot, head size 4: weights are softmax(q.k / 2)."""
    query = torch.tensor([2.0, 0, 0, 0]).view(1, 1, 1, 1, 4)
    far, near = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])
    pair = (far.view(1, 1, 1, 4), far.view(1, 1, 1, 4), near.view(1, 1, 1, 1, 4), near.view(1, 1, 1, 1, 4))
    out = path(name)(query, *pair, Spans(torch.zeros(1, 1).long(), torch.ones(1, 1).long()))
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(out.flatten(), torch.tensor([float(e / (e + 1)), float(1 / (e + 1)), 0, 0]))


def moved(attend: Attend, tensors: list[torch.Tensor], rule: Spans, part: str, index: tuple[int, ...]) -> torch.Tensor:
    """[B,N,S]: slots whose output is not the same bit for bit once key and value (of "context" or "block") change."""
    changed = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        before = attend(*changed, rule)
        for number in (1, 2) if part == "context" else (3, 4):
            changed[number][index] += 1.0 + number
        return (attend(*changed, rule) != before).any(-1).any(-1)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("window", [0, 5])
def test_only_visible_context_moves_a_slot(name: str, window: int) -> None:
    """D2, D8: overlapping blocks (anchors 4 and 6), documents, padding: exactly the slots of the rule move."""
    end = torch.tensor([[4, 6, 9, 11, 0], [3, 3, 6, 10, 10]])
    first = torch.tensor([[0, 0, 0, 0, 0], [0, 2, 3, 6, 9]])
    rule, tensors = Spans(first, end, window=window), inputs((2, 5, 8, 12, 4, 2, 4), torch.float32)
    for row in range(2):
        for token in range(12):
            expected = torch.zeros(2, 5, 8, dtype=torch.bool)
            for block in range(5):
                for o in range(8):
                    a, s = int(end[row, block]), int(first[row, block])
                    expected[row, block, o] = s <= token < a and (window == 0 or a + o - token < window)
            assert torch.equal(moved(path(name), tensors, rule, "context", (row, token)), expected), (row, token)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_only_slots_of_its_own_block_move_a_slot(name: str, causal: bool) -> None:
    """D3: a later slot moves an earlier one only where attention is not causal; other blocks never move."""
    end = torch.tensor([[4, 6, 0], [3, 9, 9]])
    rule, tensors = Spans(torch.zeros_like(end), end, causal), inputs((2, 3, 4, 9, 4, 2, 4), torch.float32)
    for slot in range(4):
        expected = torch.zeros(2, 3, 4, dtype=torch.bool)
        expected[1, 1, slot if causal else 0 :] = True
        assert torch.equal(moved(path(name), tensors, rule, "block", (1, 1, slot)), expected)


@pytest.mark.parametrize("name", FAST)
def test_large_scores_stay_finite(name: str) -> None:
    """Either part may hold all of the softmax."""
    for far, near in ((100.0, 1.0), (1.0, 100.0), (100.0, 100.0)):
        tensors = [x.detach() for x in inputs((2, 5, 3, 9, 4, 2, 4))]
        tensors[0], tensors[1], tensors[3] = tensors[0] * 10, tensors[1] * far, tensors[3] * near
        rule = spans((2, 5, 3, 9), "documents", True, 0)
        assert_same(path(name), [x.requires_grad_() for x in tensors], rule)


@pytest.mark.parametrize("name", FAST)
def test_half_precision(name: str) -> None:
    """two_part computes in float32 and rounds the result; sdpa's kernel holds only the softmax in float32."""
    shape = (2, 3, 5, 7, 4, 2, 6)
    tensors, rule = inputs(shape, torch.bfloat16), spans(shape, "sorted", False, 0)
    found = path(name)(*tensors, rule)
    exact = naive.block_attention(*(tensor.double() for tensor in tensors), rule)
    assert found.dtype == torch.bfloat16
    near = 2**-8 if name == "two_part" else 2**-6
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=1e-6 if name == "two_part" else near)
    mixed = path(name)(tensors[0], *(tensor.float() for tensor in tensors[1:]), rule)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.double(), exact, rtol=2**-7, atol=1e-5)


def test_choice() -> None:
    assert choose("cpu", torch.float32, 64) == "two_part" and choose("cpu", torch.float32, 1) == "sdpa"
    assert choose("cuda", torch.float64, 64) == "sdpa"
    shape = (1, 3, 2, 5, 2, 1, 4)
    tensors, rule = inputs(shape), spans(shape, "sorted", False, 0)
    expected = naive.block_attention(*tensors, rule)
    assert torch.equal(block_attention(*tensors, rule), two_part.block_attention(*tensors, rule))
    assert torch.equal(block_attention(*tensors, rule, path="naive"), expected)
    with pytest.raises(ValueError, match="no path 'dense'; choose one of naive, two_part, sdpa, flex"):
        block_attention(*tensors, rule, path="dense")
