"""The lean pass against the model's own: states, texts, and when it is not used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from specgraft.targets import lean, product
from specgraft.targets.attention import NAME
from specgraft.targets.generate import Request, generate
from specgraft.targets.model import Target
from specgraft.targets.slots import SlotCache
from specgraft.targets.static import StaticCache, divided

CONFIGS = {
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
}


def target_of(kind: str, dtype: torch.dtype = torch.float32, **more) -> Target:
    torch.manual_seed(0)
    make, own = CONFIGS[kind]
    config = make(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=None,
        attn_implementation=NAME, **{**own, **more},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return Target(model, SimpleNamespace(eos_token_id=1, chat_template="stub"), Path("tiny"), torch.device("cpu"))


def own(target: Target, ids: torch.Tensor, taps) -> tuple[torch.Tensor, torch.Tensor]:
    """By the model's layers as they are."""
    cache = SlotCache(len(ids), ids.shape[1], target.device)
    step = target.run(cache.begin(ids), taps)
    return step.last, step.taps


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pack", [False, True])
def test_states_are_the_models_own(monkeypatch, kind, dtype, pack) -> None:
    monkeypatch.setattr(product, "PACK_LIMIT", 1 << 30 if pack else 0)
    target = target_of(kind, dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (3, 24), generator=generator)
    last, taps = own(target, ids, [0, 2])
    cache = target.cache(3, 24)
    assert isinstance(cache, StaticCache) and target.lean().pack == (pack and dtype != torch.float64)
    found, tapped = [], []
    for first, end in ((0, 9), (9, 10), (10, 18), (18, 24)):
        step = target.forward(ids[:, first:end], cache, [0, 2])
        cache.lengths += end - first
        found.append(step.last)
        tapped.append(step.taps)
    near = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(torch.cat(found, 1), last, rtol=near, atol=near * float(last.abs().max()) / 4)
    torch.testing.assert_close(torch.cat(tapped, 1), taps, rtol=near, atol=near * float(taps.abs().max()) / 4)
    logits = target.head(target.final_norm(last)).float()
    torch.testing.assert_close(target.logits(last), logits, rtol=near, atol=near)


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_text_is_hugging_faces(kind) -> None:
    target = target_of(kind)
    requests = [Request(torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist(), 20) for n in (3, 9, 1, 14, 6)]
    generate(target, requests, 3)
    target.model.set_attn_implementation("eager")
    for request in requests:
        ids = torch.tensor([request.ids])
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert request.output == out[0, len(request.ids) :].tolist()


def test_the_same_with_a_bound_instead_of_lengths() -> None:
    target = target_of("qwen3", torch.float64)
    generator = torch.Generator().manual_seed(1)
    for rows in (None, torch.tensor([0, 2])):
        steps = []
        for reach in (None, 20):
            cache = target.cache(3, 24)
            cache.lengths += torch.tensor([3, 9, 6])
            for pair in cache.layers:
                for store in pair:
                    store.normal_(generator=generator.manual_seed(2))
            ids = torch.randint(0, 64, (3 if rows is None else 2, 4), generator=generator.manual_seed(3))
            steps.append(target.forward(ids, cache, [1], rows, reach))
        torch.testing.assert_close(steps[0].last, steps[1].last, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(steps[0].taps, steps[1].taps, rtol=1e-12, atol=1e-12)


def test_packed_prompts_leave_what_padded_ones_leave() -> None:
    target = target_of("llama", torch.float64)
    texts = [torch.arange(2, 2 + n) for n in (5, 12, 1)]
    packed, padded = target.cache(3, 20), target.cache(3, 20)
    counts, rows = torch.tensor([5, 12, 1]), torch.arange(3)
    step = target.forward_packed(torch.cat(texts), counts, packed, [0], rows)
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    other = target.forward(ids, padded, [0])
    real = torch.arange(12) < counts[:, None]
    torch.testing.assert_close(step.last[0], other.last[real], rtol=1e-12, atol=1e-12)
    packed.lengths += counts
    padded.lengths += counts
    new, wide = torch.tensor([3, 4, 5, 6]), torch.tensor([2, 1, 1])  # behind prompts: rows of unlike lengths
    again = target.forward_packed(new, wide, packed, [0], rows)
    plain = target.forward(torch.tensor([[3, 4], [5, 5], [6, 6]]), padded, [0])
    expected = torch.stack([plain.last[0, 0], plain.last[0, 1], plain.last[1, 0], plain.last[2, 0]])
    torch.testing.assert_close(again.last[0], expected, rtol=1e-12, atol=1e-12)


def test_runs_are_consecutive_rows_of_like_length() -> None:
    assert divided([0, 1, 2, 3], [9, 9, 8, 9], 1) == [(0, 4)]
    assert divided([0, 1, 3, 4], [9, 9, 8, 9], 1) == [(0, 2), (2, 4)]
    assert divided([0, 1, 2, 3], [900, 890, 100, 90], 1) == [(0, 2), (2, 4)]
    assert divided([0, 1], [0, 9], 4) == [(0, 1), (1, 2)]


def test_layers_that_somebody_listens_to_run_as_they_are() -> None:
    target = target_of("llama")
    assert isinstance(target.cache(1, 4), StaticCache)
    seen = []
    handle = target.layers[1].register_forward_hook(lambda *args: seen.append(1))
    target.forward(torch.tensor([[3, 4]]), target.cache(1, 4))
    handle.remove()
    assert seen == [1] and isinstance(target.cache(1, 4), StaticCache)


def test_what_is_not_known_or_not_equal_runs_as_it_is(monkeypatch) -> None:
    assert target_of("llama", hidden_act="gelu").lean() is None
    assert target_of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1).lean() is None
    assert target_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).lean() is None
    target = target_of("llama")
    target.layers[0].mlp.forward = lambda x: x
    assert target.lean() is None
    wrong = lean.norm
    monkeypatch.setattr(lean, "norm", lambda x, module: wrong(x, module) * 1.01)
    assert target_of("llama").lean() is None and isinstance(target_of("llama").cache(1, 4), SlotCache)


def test_changed_weights_are_read_again() -> None:
    target = target_of("llama")
    before = target.forward(torch.tensor([[3, 4]]), target.cache(1, 4)).last
    with torch.no_grad():
        target.layers[0].self_attn.v_proj.weight.mul_(3.0)
    after = target.forward(torch.tensor([[3, 4]]), target.cache(1, 4)).last
    expected, _ = own(target, torch.tensor([[3, 4]]), [0])
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
