"""Gated delta rule: chunks equal the definition, values, states and every gradient; nothing reads what follows or lies beside.

Legend: R rows, T tokens, H value heads, Hk query and key heads, dk key and dv value head size, C tokens of one chunk.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specgraft.ops.gated_delta import chunked, fla
from specgraft.ops.gated_delta.choose import choose
from specgraft.ops.gated_delta.chunked import Record, gated_delta
from specgraft.ops.gated_delta.naive import recurrent_gated_delta

KINDS = ("gdn", "kda")
SHAPES = [  # R, T, Hk, H, dk, dv
    (1, 1, 1, 1, 1, 1),
    (2, 7, 1, 2, 3, 5),
    (33, 6, 2, 2, 4, 2),
    (1, 130, 2, 4, 8, 6),
    (3, 64, 1, 3, 5, 2),
]
CHUNKS = (1, 5, 16, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(
    kind: str,
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = torch.float64,
    decay: str = "mixed",
    initial: bool = True,
) -> list[Tensor | None]:
    """q, k, v, g, beta, initial. Decays: "mixed" about -1.6; "strong" also -50 and 0; every eighth beta is 0, KDA's reach 2."""
    rows, tokens, key_heads, heads, dk, dv = shape
    draw = torch.Generator().manual_seed(hash(shape) % 1000)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float64)

    q, k = normal(rows, tokens, key_heads, dk), normal(rows, tokens, key_heads, dk)
    v = normal(rows, tokens, heads, dv)
    size = (rows, tokens, heads, dk) if kind == "kda" else (rows, tokens, heads)
    g = -2 * torch.nn.functional.softplus(normal(*size))
    if decay == "strong":
        g = g.masked_fill(normal(*size) > 0.5, -50.0).masked_fill(normal(*size) > 0.5, 0.0)
    beta = torch.sigmoid(3 * normal(rows, tokens, heads)) * (2 if kind == "kda" else 1)
    beta = beta.masked_fill(normal(rows, tokens, heads) > 1.2, 0.0)
    state = normal(rows, heads, dk, dv) if initial else None
    return [None if x is None else x.to(dtype) for x in (q, k, v, g, beta, state)]


def every_state(record: Record, rows: int, tokens: int) -> Tensor:
    """[R,T+1,H,dk,dv], in one call."""
    row = torch.arange(rows).repeat_interleave(tokens + 1)
    return record.after(row, torch.arange(tokens + 1).repeat(rows)).unflatten(0, (rows, tokens + 1))


def far(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).detach().abs().max()) if x.numel() else 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokenwise", [True, False])
def test_worked_by_hand(kind: str, tokenwise: bool) -> None:
    """dk = dv = 1, keys 2 and -2 (so +-1, nearly): the state goes 4, 3, -3.75."""
    q, k = torch.tensor([[1.0, 3.0]]).double(), torch.tensor([[2.0, -2.0]]).double()
    v, g = torch.tensor([[4.0, 3.75]]).double(), torch.tensor([[math.log(0.5), math.log(0.25)]]).double()
    beta, initial = torch.tensor([[[0.5], [1.0]]]).double(), torch.full((1, 1, 1, 1), 4.0).double()
    q, k, v = (x[..., None, None] for x in (q, k, v))
    g = g[..., None, None] if kind == "kda" else g[..., None]
    # token 0: S = 2, u = 0.5 (4 - 2) = 1, S = 3; token 1: S = 0.75, k = -1, u = 3.75 + 0.75 = 4.5, S = 0.75 - 4.5 = -3.75
    if tokenwise:
        o, states = recurrent_gated_delta(q, k, v, g, beta, initial)
    else:
        o, record = gated_delta(q, k, v, g, beta, initial)
        states = every_state(record, 1, 2)
    assert states.flatten().tolist() == pytest.approx([4.0, 3.0, -3.75], abs=1e-5)
    assert o.flatten().tolist() == pytest.approx([3.0, -3.75], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["mixed", "strong"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_equal_the_definition(
    kind: str, decay: str, initial: bool, shape: tuple[int, int, int, int, int, int]
) -> None:
    """Outputs, the state after 0..T tokens, and the gradients of both."""
    args = inputs(kind, shape, decay=decay, initial=initial)
    leaves = [x.requires_grad_() for x in args if x is not None]
    o, states = recurrent_gated_delta(*args)
    of_o, of_states = torch.randn_like(o), torch.randn_like(states)
    wanted = torch.autograd.grad((o * of_o).sum() + (states * of_states).sum(), leaves)
    for chunk in CHUNKS:
        mine, record = gated_delta(*args, chunk=chunk)
        mine_states = every_state(record, shape[0], shape[1])
        assert far(mine, o) < 1e-11 and far(mine_states, states) < 1e-11, chunk
        got = torch.autograd.grad((mine * of_o).sum() + (mine_states * of_states).sum(), leaves)
        assert max(far(x, y) for x, y in zip(got, wanted, strict=True)) < 1e-9, chunk


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_is_of_the_agreed_shapes(kind: str) -> None:
    rows, tokens, _, heads, dk, dv = shape = (2, 19, 1, 2, 4, 3)
    args = inputs(kind, shape)
    _, states = recurrent_gated_delta(*args)
    _, record = gated_delta(*args, chunk=8)
    assert record.chunk == 8
    assert record.states.shape == (rows, 4, heads, dk, dv)
    assert record.keys.shape == (rows, 24, heads, dk) and record.news.shape == (rows, 24, heads, dv)
    assert record.decay.shape == (rows, 24, heads, *([dk] if kind == "kda" else []))
    assert not record.keys[:, tokens:].any() and not record.news[:, tokens:].any()
    assert far(record.states, states[:, [0, 8, 16, 19]]) < 1e-12
    assert record.decay.dtype == torch.float64
    assert far(record.decay[:, 8:16], args[3][:, 8:16].cumsum(1)) < 1e-12
    # at a border nothing is computed
    at = record.after(torch.tensor([1, 0, 1]), torch.tensor([0, 8, 16]))
    assert torch.equal(at, record.states[[1, 0, 1], [0, 1, 2]])


def test_short_texts_are_not_padded_to_a_chunk() -> None:
    args = inputs("gdn", (32, 7, 1, 1, 4, 4))
    assert gated_delta(*args, chunk=64)[1].keys.shape[1] == 7
    assert gated_delta(*args, chunk=8)[1].keys.shape[1] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: str) -> None:
    args = inputs(kind, (2, 0, 1, 2, 3, 4))
    o, record = gated_delta(*args)
    assert o.shape == (2, 0, 2, 4)
    assert torch.equal(record.after(torch.tensor([1, 0, 1]), torch.zeros(3, dtype=torch.long)), args[5][[1, 0, 1]])


def test_no_such_chunk() -> None:
    with pytest.raises(ValueError, match="chunks of 0"):
        gated_delta(*inputs("gdn", SHAPES[0]), chunk=0)


@pytest.mark.parametrize("kind", KINDS)
def test_beta_and_decay_of_zero_leave_the_state_alone(kind: str) -> None:
    args = inputs(kind, (2, 20, 1, 2, 4, 3), torch.float32)
    args[3][:, 11:], args[4][:, 11:] = 0, 0
    _, record = gated_delta(*args, chunk=8)
    states = every_state(record, 2, 20)
    assert far(states[:, 11:], states[:, 11:12].expand(-1, 10, -1, -1, -1)) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["strong", "infinite"])
def test_strong_decays_neither_overflow_nor_blur_what_follows(kind: str, decay: str) -> None:
    args = inputs(kind, (2, 150, 1, 2, 8, 8), decay="strong")
    if decay == "infinite":
        args[3] = args[3].masked_fill(args[3] < -49, -math.inf)
    o, states = recurrent_gated_delta(*args)
    mine, record = gated_delta(*args)
    assert far(mine, o) < 1e-11 and far(every_state(record, 2, 150), states) < 1e-11
    single = [x.float().requires_grad_() for x in args]
    rounded, rounded_states = recurrent_gated_delta(*single)
    mine, record = gated_delta(*single)
    # no worse than the definition itself in float32; sums of decays in float32 are worse by 20 times
    assert far(mine, o) < 3 * far(rounded, o)
    assert far(every_state(record, 2, 150), states) < 3 * far(rounded_states, states)
    for gradient in torch.autograd.grad(mine.sum(), single):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_is_computed_in_float32(kind: str) -> None:
    args = [x.bfloat16() for x in inputs(kind, (2, 40, 1, 2, 8, 8))]
    o, record = gated_delta(*args, chunk=16)
    wide, wide_record = gated_delta(*(x.float() for x in args), chunk=16)
    assert o.dtype == torch.bfloat16 and torch.equal(o, wide.bfloat16())
    assert record.states.dtype == torch.float32 and torch.equal(record.states, wide_record.states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", ["other", "nan", "inf"])
@pytest.mark.parametrize("shape, chunk", [((2, 40, 1, 2, 8, 6), 16), ((1, 70, 1, 1, 64, 64), 64)], ids=str)
def test_what_follows_moves_nothing(
    kind: str, noise: str, shape: tuple[int, int, int, int, int, int], chunk: int
) -> None:
    """Bitwise: the states after n tokens and fewer, whatever comes after; outputs, whatever finite comes after."""
    args = inputs(kind, shape, torch.float32)
    o, record = gated_delta(*args, chunk=chunk)
    states = every_state(record, shape[0], shape[1])
    for n in (0, 1, 5, chunk - 1, chunk, chunk + 1, shape[1] - 1):
        changed = [x.clone() for x in args]
        for x in changed[:5]:
            x[:, n:] = torch.randn_like(x[:, n:]) if noise == "other" else float(noise)
        changed[3] = -changed[3].abs()
        mine, other = gated_delta(*changed, chunk=chunk)
        assert torch.equal(every_state(other, shape[0], shape[1])[:, : n + 1], states[:, : n + 1]), n
        seen = n if noise == "other" else n // chunk * chunk
        assert torch.equal(mine[:, :seen], o[:, :seen]), n
        assert not torch.equal(mine[:, n], o[:, n]), n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", ["other", "nan", "inf"])
def test_rows_never_meet(kind: str, noise: str) -> None:
    args = inputs(kind, (5, 40, 2, 4, 16, 8), torch.float32)
    changed = [x.clone() for x in args]
    for x in changed:
        x[[0, 1, 3]] = torch.randn_like(x[:3]) if noise == "other" else float(noise)
    changed[3] = -changed[3].abs()
    o, record = gated_delta(*args, chunk=16)
    mine, other = gated_delta(*changed, chunk=16)
    assert torch.equal(mine[[2, 4]], o[[2, 4]]) and not torch.equal(mine[0], o[0])
    assert torch.equal(every_state(other, 5, 40)[[2, 4]], every_state(record, 5, 40)[[2, 4]])


def test_gradients_stay_in_their_row_and_before_their_token() -> None:
    args = inputs("kda", (3, 20, 1, 2, 4, 4), torch.float32)
    leaves = [x.requires_grad_() for x in args]
    _, record = gated_delta(*leaves, chunk=8)
    for gradient in torch.autograd.grad(record.after(torch.tensor([1]), torch.tensor([11])).sum(), leaves[1:]):
        assert not gradient[[0, 2]].any() and gradient[1].any()
        assert gradient.shape[1] != 20 or not gradient[1, 11:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 2, 2, 16, 16), (2, 130, 2, 2, 16, 16), (7, 6, 2, 2, 16, 16)], ids=str)
def test_equals_transformers(kind: str, shape: tuple[int, int, int, int, int, int]) -> None:
    """Its own chunk and recurrent functions, in float32."""
    name = "qwen3_next" if kind == "gdn" else "kimi_linear"
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    names = {
        "gdn": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        "kda": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    }[kind]
    args = inputs(kind, shape, torch.float32)
    o, record = gated_delta(*args)
    for name in names:
        if not hasattr(module, name):
            pytest.skip(f"this transformers has no {name}")
        theirs, last = getattr(module, name)(
            *args[:5], initial_state=args[5], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert far(o, theirs) < 5e-6 and far(record.states[:, -1], last) < 2e-5


def stand_in(calls: list[dict[str, object]], needed_decay: int) -> object:
    """What the package offers, by the definition: its first arguments in its order, and no default that would hide one."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert use_qk_l2norm_in_kernel and scale is None and output_final_state
        assert (
            q.shape == k.shape and q.shape[:3] == v.shape[:3] == beta.shape == g.shape[:3] and g.dim() == needed_decay
        )
        assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32
        assert initial_state is not None and initial_state.dtype == torch.float32
        assert initial_state.shape == (len(q), q.shape[2], q.shape[3], v.shape[3])
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
        calls.append({"tokens": q.shape[1]})
        o, states = recurrent_gated_delta(q, k, v, g, beta, initial_state)
        return o, states[:, -1]

    return kernel


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A flash-linear-attention made of the definition; the calls made to it."""
    calls: list[dict[str, object]] = []
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda")}
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = stand_in(calls, 3)  # type: ignore[attr-defined]
    modules["fla.ops.kda"].chunk_kda = stand_in(calls, 4)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("chunk, segments", [(16, [16, 16, 8]), (64, [40])])
def test_fla_is_called_a_chunk_at_a_time(
    package: list[dict[str, object]], kind: str, initial: bool, chunk: int, segments: list[int]
) -> None:
    args = inputs(kind, (3, 40, 1, 2, 8, 4), initial=initial)
    leaves = [x.bfloat16().requires_grad_() for x in args if x is not None]
    o, record = fla.gated_delta(*leaves, chunk=chunk)
    assert [call["tokens"] for call in package] == segments
    expected, other = gated_delta(*leaves, chunk=chunk)
    assert o.dtype == torch.bfloat16 and far(o, expected) < 0.02
    assert record.chunk == other.chunk
    for name in ("states", "keys", "news", "decay"):
        mine, theirs = getattr(record, name), getattr(other, name)
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and far(mine, theirs) < 2e-5, name
    mine, theirs = every_state(record, 3, 40), every_state(other, 3, 40)
    assert far(mine, theirs) < 2e-5
    for x, y in zip(
        torch.autograd.grad(mine.sum(), leaves[1:]), torch.autograd.grad(theirs.sum(), leaves[1:]), strict=True
    ):
        assert far(x, y) <= 0.02 * float(y.abs().max())


def test_fla_leaves_wide_inputs_to_the_chunks(package: list[dict[str, object]]) -> None:
    args = inputs("gdn", (1, 20, 1, 1, 4, 4), torch.float32)
    assert torch.equal(fla.gated_delta(*args)[0], gated_delta(*args)[0]) and not package


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose("cuda") is chunked.gated_delta
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose("cuda:1") is fla.gated_delta
    assert choose(torch.device("cpu")) is chunked.gated_delta
