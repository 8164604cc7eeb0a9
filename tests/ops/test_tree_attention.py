"""Tree attention: the fast path equals the definition and a dense mask; what a node does not see moves it by exactly 0.

Legend: N branches, W nodes a branch, S stem tokens, H query heads, Hk key/value heads, d key size, dv value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from specgraft.ops.tree_attention import naive, two_part

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
SHAPES = [  # N, W, S, H, Hk, d, dv
    (1, 1, 1, 1, 1, 2, 2),
    (5, 3, 11, 6, 2, 4, 6),
    (7, 4, 33, 3, 3, 5, 3),
    (3, 9, 2, 8, 1, 6, 5),
    (2, 70, 13, 2, 1, 4, 4),
    (9, 1, 300, 4, 2, 8, 8),
    (4, 5, 600, 6, 3, 3, 7),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Inputs(NamedTuple):
    query: torch.Tensor
    stem_key: torch.Tensor
    stem_value: torch.Tensor
    own_key: torch.Tensor
    own_value: torch.Tensor
    stem_mask: torch.Tensor
    own_mask: torch.Tensor
    scale: float
    sinks: torch.Tensor | None


def inputs(
    shape: tuple[int, ...], kind: str = "causal", dtype: torch.dtype = torch.float64, sinks: bool = False
) -> Inputs:
    """causal: all up to the anchor; window: the last 5 of those; sparse: any choice of those, a node's own token or not."""
    branches, width, stem, heads, key_heads, size, value_size = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def make(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    anchors = torch.randint(0, stem, (branches,), generator=generator)
    anchors[0], anchors[-1] = 0, stem - 1
    stem_mask = (torch.arange(stem) <= anchors[:, None])[:, None].expand(branches, width, stem)
    own_mask = torch.ones(width, width, dtype=torch.bool).tril().expand(branches, width, width)
    if kind == "window":
        at = anchors[:, None] + 1 + torch.arange(width)
        stem_mask, own_mask = stem_mask & (at[..., None] - torch.arange(stem) < 5), own_mask.triu(-4)
    if kind == "sparse":
        first = torch.arange(stem) == 0
        stem_mask = stem_mask & ((torch.rand(branches, width, stem, generator=generator) < 0.3) | first)
        own_mask = own_mask & (torch.rand(branches, width, width, generator=generator) < 0.5)
    return Inputs(
        make(branches, width, heads, size) * 2,
        make(stem, key_heads, size),
        make(stem, key_heads, value_size),
        make(branches, width, key_heads, size),
        make(branches, width, key_heads, value_size),
        stem_mask,
        own_mask,
        size**-0.5,
        make(heads) if sinks else None,
    )


def dense(x: Inputs) -> torch.Tensor:
    """One softmax over the stem and the nodes of all branches, [N*W, S + N*W]."""
    branches, width = x.query.shape[:2]
    own = torch.zeros(branches, width, branches, width, dtype=torch.bool)
    own[torch.arange(branches), :, torch.arange(branches)] = x.own_mask
    mask = torch.cat([x.stem_mask.flatten(0, 1), own.view(branches * width, -1)], 1)
    query = x.query.flatten(0, 1).transpose(0, 1)[None]
    key = torch.cat([x.stem_key, x.own_key.flatten(0, 1)]).transpose(0, 1)[None]
    value = torch.cat([x.stem_value, x.own_value.flatten(0, 1)]).transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=x.scale, enable_gqa=True)
    return out[0].transpose(0, 1).unflatten(0, (branches, width))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", ["causal", "window", "sparse"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape: tuple[int, ...], kind: str, sinks: bool, dtype: torch.dtype) -> None:
    x = inputs(shape, kind, dtype, sinks)
    wanted = naive.tree_attention(*x)
    lines = shape[1] * shape[3] // shape[4] * (shape[2] + shape[1] + 1)
    for budget in (None, 1, 2 * lines):
        found = two_part.tree_attention(*x, budget=budget)
        assert found.dtype == dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "sparse"])
def test_equals_a_dense_mask(kind: str, dtype: torch.dtype) -> None:
    x = inputs((32, 7, 512, 9, 3, 64, 64), kind, dtype)
    torch.testing.assert_close(two_part.tree_attention(*x), dense(x), rtol=0, atol=TOLERANCE[dtype])


def test_bfloat16_is_computed_in_float32() -> None:
    x = inputs((5, 3, 40, 6, 2, 8, 8), "sparse", torch.bfloat16, sinks=True)
    found = two_part.tree_attention(*x)
    wide = naive.tree_attention(*(y.float() if torch.is_tensor(y) and y.is_floating_point() else y for y in x))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wide, rtol=2**-8, atol=1e-5)


def test_a_sink_takes_its_share() -> None:
    x = inputs((2, 3, 6, 4, 2, 4, 4), sinks=True)
    low, high = (two_part.tree_attention(*x._replace(sinks=torch.full((4,), s))) for s in (-1e9, 1e9))
    torch.testing.assert_close(low, two_part.tree_attention(*x._replace(sinks=None)), rtol=0, atol=1e-12)
    assert not high.any()


@pytest.mark.parametrize(
    "huge", [1.0, 3e38], ids=["usual", "huge"]
)  # huge: hidden scores are inf or nan before the mask
@pytest.mark.parametrize("kind", ["causal", "window", "sparse"])
def test_what_is_hidden_moves_nothing(kind: str, huge: float) -> None:
    """By not one bit, in float32, at a size where products are cut into blocks and branches into chunks."""
    x = inputs((32, 7, 512, 9, 3, 64, 64), kind, torch.float32)
    before = two_part.tree_attention(*x)
    generator = torch.Generator().manual_seed(7)

    def other(like: torch.Tensor) -> torch.Tensor:
        return huge * (torch.randn(like.shape, generator=generator) if huge == 1.0 else torch.randn(like.shape).sign())

    # another branch: node 3 of branch 5 and those behind it see it, all others do not
    keys, values, query = x.own_key.clone(), x.own_value.clone(), x.query.clone()
    keys[5, 3:], values[5, 3:], query[5, 3:] = other(keys[5, 3:]), other(values[5, 3:]), other(query[5, 3:])
    after = two_part.tree_attention(*x._replace(own_key=keys, own_value=values, query=query))
    rest = torch.ones(32, 7, dtype=torch.bool)
    rest[5, 3:] = False
    assert torch.equal(after[rest], before[rest])
    assert not torch.equal(after[5, 3:], before[5, 3:])

    # the stem where a node does not look
    for branch, node in ((0, 0), (13, 6), (31, 3)):
        hidden = ~x.stem_mask[branch, node]
        keys, values = x.stem_key.clone(), x.stem_value.clone()
        keys[hidden], values[hidden] = other(keys[hidden]), other(values[hidden])
        after = two_part.tree_attention(*x._replace(stem_key=keys, stem_value=values))
        assert torch.equal(after[branch, node], before[branch, node])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_another_branch_sees_moves_nothing(dtype: torch.dtype) -> None:
    """Though a chunk of branches leaves out the tiles of the stem that none of them reads; 8 a chunk here, two see one tile."""
    x = inputs((32, 7, 700, 9, 3, 64, 64), "causal", dtype, sinks=True)
    reach = torch.linspace(1, 700, 32).long()
    x = x._replace(stem_mask=(torch.arange(700) < reach[:, None])[:, None].expand(32, 7, 700))
    budget = 8 * 21 * (16 + 700)
    before = two_part.tree_attention(*x, budget=budget)
    others = torch.arange(32) != 1
    for low, high in ((0, 0), (0, 1), (0, 300), (0, 700), (600, 700)):
        mask = x.stem_mask.clone()
        mask[1] = (torch.arange(700) >= low) & (torch.arange(700) < high)
        after = two_part.tree_attention(*x._replace(stem_mask=mask), budget=budget)
        assert torch.equal(after[others], before[others])
    wanted = naive.tree_attention(*x._replace(stem_mask=mask))
    torch.testing.assert_close(after, wanted, rtol=0, atol=TOLERANCE[dtype])


def test_tiles_that_no_branch_of_a_chunk_reads_are_left_out() -> None:
    mask = torch.zeros(5, 2, 11, dtype=torch.bool)
    mask[0, 1, 3], mask[1, 0, 10], mask[4, 1, 4] = True, True, True
    first, middle, last = slice(0, 4), slice(4, 8), slice(8, 11)
    assert two_part._tiles(mask, 2, 4) == [[first, last], [], [middle]]
    assert two_part._tiles(mask, 5, 4) == [[first, middle, last]]
    assert two_part._tiles(mask, 3, 11) == [[slice(0, 11)]] * 2


def test_under_no_grad_and_inference_mode() -> None:
    x = inputs((3, 2, 9, 4, 2, 4, 4))
    wanted = two_part.tree_attention(*x)
    x.query.requires_grad_()
    with torch.no_grad():
        assert torch.equal(two_part.tree_attention(*x), wanted)
    with torch.inference_mode():
        assert torch.equal(two_part.tree_attention(*x), wanted)
    with pytest.raises(ValueError, match="no gradient"):
        two_part.tree_attention(*x)


def test_inputs_stay_as_they_are() -> None:
    x = inputs((3, 2, 9, 4, 2, 4, 4), "sparse", sinks=True)
    copies = [y.clone() if torch.is_tensor(y) else y for y in x]
    two_part.tree_attention(*x)
    assert all(torch.equal(a, b) for a, b in zip(x, copies, strict=True) if torch.is_tensor(a))


@pytest.mark.parametrize("shape", [(0, 3, 5), (0, 3, 600), (2, 0, 5), (2, 0, 600), (2, 3, 0)], ids=str)
def test_nothing_to_attend_to_or_from(shape: tuple[int, int, int]) -> None:
    branches, width, stem = shape
    own = torch.ones(width, width, dtype=torch.bool).tril().expand(branches, width, width)
    sizes = [(branches, width, 4, 8), (stem, 2, 8), (stem, 2, 8), (branches, width, 2, 8), (branches, width, 2, 8)]
    x = [*(torch.randn(s) for s in sizes), torch.ones(branches, width, stem, dtype=torch.bool), own, 0.3]
    torch.testing.assert_close(two_part.tree_attention(*x), naive.tree_attention(*x))


class Largest(TorchDispatchMode):
    """The most elements of a storage that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


def test_memory_is_bounded() -> None:
    """No [N*W, N*W], and no key per branch or per query head: nothing larger than an input, the mask or the budget."""
    branches, width, stem = 64, 8, 96
    x = inputs((branches, width, stem, 8, 2, 16, 16), dtype=torch.float32)
    with Largest() as seen:
        two_part.tree_attention(*x, budget=2**15)
    assert seen.elements <= max(2**15, x.query.numel(), branches * width * (stem + width))
    assert seen.elements < min((branches * width) ** 2, branches * x.stem_key.numel())
