"""Block attention: the two-part form equals the dense definition, values and every gradient.

Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import pytest
import torch

from specgraft.ops.block_attention import naive, two_part

SHAPES = [  # B, N, S, T, H, Hk, d
    (1, 1, 1, 1, 1, 1, 2),
    (2, 3, 5, 7, 4, 2, 6),
    (1, 18, 7, 11, 6, 3, 4),
    (3, 2, 3, 13, 3, 3, 5),
    (2, 5, 4, 1, 9, 3, 3),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    batch, blocks, slots, length, heads, key_heads, size = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = [
        random(batch, blocks, slots, heads, size),
        random(batch, length, key_heads, size),
        random(batch, length, key_heads, size),
        random(batch, blocks, slots, key_heads, size),
        random(batch, blocks, slots, key_heads, size),
    ]
    visible = torch.rand(batch, blocks, length, generator=generator) < 0.6  # with holes
    visible[:, 0] = False  # a block at the start of a text sees no context at all
    return tensors, visible


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_part_equals_naive_in_value_and_every_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors, visible = inputs(shape, dtype)
    expected = naive.block_attention(*tensors, visible)
    found = two_part.block_attention(*tensors, visible)
    assert found.dtype == dtype and found.shape == expected.shape == tensors[0].shape
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **close)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for name, a, b in zip(
        ("query", "context_key", "context_value", "block_key", "block_value"),
        torch.autograd.grad((found * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attend", [naive.block_attention, two_part.block_attention], ids=["naive", "two_part"])
def test_a_single_slot_without_context_returns_its_own_value(attend) -> None:  # type: ignore[no-untyped-def]
    tensors, visible = inputs((1, 2, 1, 3, 4, 2, 6), torch.float64)
    out = attend(*tensors, torch.zeros_like(visible))
    torch.testing.assert_close(out, tensors[4].repeat_interleave(2, 3), rtol=0, atol=0)


@pytest.mark.parametrize("attend", [naive.block_attention, two_part.block_attention], ids=["naive", "two_part"])
def test_two_keys_by_hand(attend) -> None:  # type: ignore[no-untyped-def]
    """One context token and one slot, head size 4: weights are softmax(q.k / 2)."""
    query = torch.tensor([2.0, 0, 0, 0]).view(1, 1, 1, 1, 4)
    far, near = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1, 0, 0])
    out = attend(query, far.view(1, 1, 1, 4), far.view(1, 1, 1, 4), near.view(1, 1, 1, 1, 4), near.view(1, 1, 1, 1, 4),
                 torch.ones(1, 1, 1, dtype=torch.bool))  # fmt: skip
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(out.flatten(), torch.tensor([float(e / (e + 1)), float(1 / (e + 1)), 0, 0]))


def test_hidden_context_and_other_blocks_have_no_influence_bit_for_bit() -> None:
    tensors, visible = inputs((2, 3, 5, 7, 4, 2, 6), torch.float32)
    before = two_part.block_attention(*tensors, visible)
    query, far_key, far_value, near_key, near_value = (tensor.detach().clone() for tensor in tensors)
    row, token = 1, 3
    far_key[row, token] += 1.0
    far_value[row, token] -= 2.0
    after = two_part.block_attention(query, far_key, far_value, near_key, near_value, visible)
    seen = visible[row, :, token]
    assert seen.any() and not seen.all()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[row][~seen], before[row][~seen])
    assert not torch.isclose(after[row][seen], before[row][seen]).all(-1).any()
    near_key, near_value = tensors[3].detach().clone(), tensors[4].detach().clone()
    near_key[0, 1, 4] += 1.0  # the last slot of block 1 is seen by every slot of block 1
    near_value[0, 1, 4] += 1.0
    after = two_part.block_attention(query, tensors[1], tensors[2], near_key, near_value, visible)
    assert torch.equal(after[0, 0], before[0, 0]) and torch.equal(after[0, 2], before[0, 2])
    assert (after[0, 1] != before[0, 1]).any(-1).all()


def test_half_precision_inputs_are_computed_in_float32() -> None:
    tensors, visible = inputs((2, 3, 5, 7, 4, 2, 6), torch.bfloat16)
    found = two_part.block_attention(*tensors, visible)
    exact = naive.block_attention(*(tensor.double() for tensor in tensors), visible)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # one rounding, of the result
