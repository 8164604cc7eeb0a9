"""The exported folder: names, shapes, dtype and every config value, spelt out; read back; refused where it cannot serve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch
from reference import hugging_face_block, plain
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config

from specgraft.check.export import export as export_gate
from specgraft.check.export import outputs
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Texts
from specgraft.drafters.shared import Shared
from specgraft.export.contract import config_json, expected_tensors
from specgraft.export.facts import TargetFacts
from specgraft.export.folder import FILES
from specgraft.export.refusals import refuse
from specgraft.export.reload import load_export
from specgraft.export.stage import export
from specgraft.run_dir import write_json
from specgraft.targets.load import digest

CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 272,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "is_causal": False,
    "block_size": 5,
    "target_layer_ids": [1, 3, 5],
    "num_target_layers": 8,
    "mask_token_id": 265,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
    "dflash_config": {"projector_type": "dspark", "mask_token_id": 265, "target_layer_ids": [1, 3, 5]},
}


DFLASH2 = {
    "kind": "dflash2", "markov_rank": 0, "confidence": False, "conv_group": 16, "selector_rank": 8, "selector_top_k": 4,
}  # fmt: skip


def test_every_config_value(made):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    assert folder == run.run.export
    assert sorted(path.name for path in folder.iterdir()) == sorted(set(FILES) - {"drafter.gguf"})
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever may read one may read all


def test_tensors_names_shapes_dtype(made):
    run = made()
    tensors = load_file(export(run.config, run.run, run.checkpoint) / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_tensors(run.drafter.config)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (128, 64)  # heads * head_dim, not hidden
    assert tensors["layers.0.self_attn.k_norm.weight"].shape == (32,)
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["confidence_head.proj.weight"].shape == (1, 80)
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    for name, tensor in run.drafter.state_dict().items():
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16))


@pytest.mark.parametrize("heads", [(64, 8, 128, 5120), (4, 2, 32, 64)])
def test_head_dim_is_written_not_derived(shape, heads):
    """faults.md E4: hidden 5120 with 64 heads of 128 is 8192 query rows, not 5120."""
    count, key, size, hidden = heads
    config = DrafterConfig(**{**shape, "heads": count, "kv_heads": key, "head_dim": size, "hidden_size": hidden})
    shapes = expected_tensors(config)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (count * size, hidden)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (hidden, count * size)
    assert config_json(config, "bfloat16")["head_dim"] == size


def test_transformers_reads_the_config(made):
    run = made()
    config = AutoConfig.from_pretrained(export(run.config, run.run, run.checkpoint))
    assert isinstance(config, Qwen3Config)
    assert (config.head_dim, config.num_hidden_layers, config.dtype) == (32, 2, torch.bfloat16)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.layer_types == ["full_attention"] * 2 and config.sliding_window is None
    for key in (
        "block_size",
        "target_layer_ids",
        "mask_token_id",
        "markov_rank",
        "sample_from_anchor",
        "dflash_config",
    ):
        assert getattr(config, key) == CONFIG[key]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reload_gives_the_drafter(made, dtype):
    run = made({"dtype": dtype})
    folder = export(run.config, run.run, run.checkpoint)
    again = load_export(folder).drafter
    assert again.config == run.drafter.config
    result = export_gate(folder, run.drafter)
    assert result.passed and result.name == "export", result.detail
    assert max(result.measured.values()) <= 1e-5
    unrounded = outputs(run.drafter)
    assert any(not torch.equal(unrounded[name], value) for name, value in outputs(again).items())


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4, "head_dim": 8}, {"layers": 3, "taps": (2,), "confidence_with_markov": False}])  # fmt: skip
def test_forward_is_the_contracts(made, changes):
    """Against a reference that shares no code: by hand in float64, and by Hugging Face's Qwen3 modules in float32."""
    run = made(**changes)
    folder = export(run.config, run.run, run.checkpoint)
    drafter = load_export(folder).drafter.double()
    reference = plain(folder)
    c = drafter.config
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, 20, len(c.taps), c.hidden_size, generator=generator, dtype=torch.float64)
    anchor, mask = embedding = torch.randn(2, c.hidden_size, generator=generator, dtype=torch.float64)
    shared = Shared(embedding, embedding, torch.nn.Identity(), 1)
    ids = torch.zeros(1, 20, dtype=torch.long)  # the anchor's token is 0 wherever it is
    for length in (1, 7, 19):
        hidden = drafter(shared, Texts(ids, taps, torch.zeros_like(ids)), torch.tensor([[length]]))[0, 0]
        expected = reference.block(taps[0, :length], anchor, mask)
        assert torch.allclose(hidden, expected, rtol=0, atol=1e-9)
        for slot, previous in ((0, 5), (c.draft_tokens - 1, 271)):
            embedded = drafter.markov_head.embed(torch.tensor(previous))
            assert torch.allclose(drafter.markov_head.markov_w2(embedded), reference.bias(previous), rtol=0, atol=1e-9)
            logit = drafter.confidence_head(hidden[slot], embedded)
            assert torch.allclose(logit, reference.confidence(expected[slot], previous), rtol=0, atol=1e-9)
        theirs = hugging_face_block(folder, taps[0, :length].float(), anchor.float(), mask.float())
        assert torch.allclose(theirs.double(), hidden, rtol=1e-4, atol=1e-4)


# --- E5: missing, extra, wrong dtype, wrong shape, and E7: config values


def edit_tensors(folder, change: Callable[[dict], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda t: [t.pop(n) for n in list(t) if "markov" in n], r"markov_head.markov_w1.weight is missing \(and 1 more\)"),
        (lambda t: t.update({"enc.aux_norm.weight": torch.ones(64)}), "enc.aux_norm.weight is not in the contract"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(272, 64)}), "embed_tokens.weight is not in the contract"),
        (lambda t: t.update({n: v.float() for n, v in t.items()}), "is float32, config.json says bfloat16"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].float()}), "norm.weight is float32"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :128].contiguous()}), r"fc.weight is \(64, 128\), .* \(64, 192\)"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "norm.weight is not finite"),
    ],
)  # fmt: skip
def test_faulty_tensors_are_named(made, change, words):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=words):
        load_export(folder)
    result = export_gate(folder, run.drafter)
    assert not result.passed and "run export again" in result.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("target_layer_ids"), "'target_layer_ids' is missing"),
        (lambda c: c.pop("is_causal"), "'is_causal' is missing"),
        (lambda c: c.update(sliding_window=16), "sliding_window is 16"),
        (lambda c: c.update(head_dim=16), "q_proj.weight is"),
        (lambda c: c.update(sample_from_anchor=False), "sample_from_anchor is False"),
        (lambda c: c.update(architectures=["DSparkDraftModel"]), "architectures is"),
        (lambda c: c.update(target_layer_ids=[2, 4, 6]), "dflash_config is"),
        (lambda c: c.update(rope_theta=1e4), "rope_theta is 10000.0"),
        (lambda c: c.update(surprise=1), "'surprise' is not in the contract"),
        (lambda c: c.clear(), "is missing"),
    ],
)  # fmt: skip
def test_faulty_config_is_named(made, change, words):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    data = json.loads((folder / "config.json").read_text())
    change(data)
    write_json(folder / "config.json", data)
    with pytest.raises(ValueError, match=words) as error:
        load_export(folder)
    assert "\n" not in str(error.value)
    assert not export_gate(folder, run.drafter).passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 6}, "draft_tokens is 6 after reload, was 5"),
        ({"num_target_layers": 9}, "target_layers is 9"),
        ({"rms_norm_eps": 1e-5}, "eps is 1e-05"),
        ({"max_position_embeddings": 2048}, "max_positions is 2048"),
    ],
)
def test_gate_sees_a_config_that_is_only_consistent(made, change, words):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | change)
    result = export_gate(folder, run.drafter)
    assert not result.passed and words in result.detail


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "markov_head.markov_w1.weight", "confidence_head.proj.bias"])  # fmt: skip
def test_gate_sees_other_weights(made, name):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    edit_tensors(folder, lambda tensors: tensors[name].mul_(1.1))
    result = export_gate(folder, run.drafter)
    assert not result.passed and "after reload" in result.detail


# --- refusals: nothing is written


@pytest.mark.parametrize(
    ("changes", "section", "words"),
    [
        ({"taps": (3, 1, 5)}, {}, r"taps \[3, 1, 5\]: must be sorted and unique"),
        ({"taps": (1, 1, 5)}, {}, "must be sorted and unique"),
        ({"taps": (1, 3, 8)}, {}, "decoder layers are 0 to 7"),
        ({"taps": (1, 3, 7)}, {}, r"tap 7 is the target's last layer.*at most 6.*export.to=\"hf\""),
        ({"mask_token_id": 272}, {}, "mask_token_id=272: the vocabulary has 272 ids"),
        ({"vocab_size": 128, "mask_token_id": 1}, {}, "vocabulary 128: the target's is 272"),
        ({"max_positions": 2048}, {}, "max_positions=2048: the target's context is 4096"),
        ({"target_layers": 9}, {}, "number of target layers 9: the target's is 8"),
        ({}, {"dtype": "float32"}, 'use export.dtype="bfloat16"'),
        ({"kind": "mtp", "markov_rank": 0, "confidence": False}, {}, "drafters.kind='mtp': engines load dspark, dflash, dflash2"),
        ({"block_causal": True}, {"to": "vllm"}, "vLLM reads other keys for them"),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 16}, {"to": "vllm"}, "vLLM reads other keys"),
        ({"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 16}, {"to": "llamacpp"}, "window was never compared"),
        ({"markov_head": "gated"}, {"to": "vllm"}, "drafters.markov_head='gated': vLLM loads only vanilla"),
        ({"markov_head": "rnn"}, {"to": "llamacpp"}, "drafters.markov_head='rnn': llama.cpp loads only vanilla"),
        ({"markov_rank": 0}, {"to": "llamacpp"}, "llama.cpp would take the file for a DFlash one"),
        ({"confidence_with_markov": False}, {"to": "llamacpp"}, "llama.cpp's head reads the Markov state too"),
        ({"taps": (1, 3, 7)}, {"to": "llamacpp"}, "which llama.cpp cannot capture"),
        ({}, {"vocabulary": 100}, "SGLang knows no reduced draft vocabulary"),
        ({}, {"vocabulary": 272, "to": "vllm"}, "the target has 272 ids; give fewer"),
        (DFLASH2, {"vocabulary": 100, "to": "vllm"}, "dflash2's selector needs every id"),
        (DFLASH2 | {"selector_top_k": 9}, {"to": "llamacpp"}, "too many for hidden size 64"),
    ],
)
def test_refusals(made, changes, section, words):
    run = made(section, **changes)
    run.target_says()
    with pytest.raises(ValueError, match=words) as error:
        export(run.config, run.run, run.checkpoint)
    assert "\n" not in str(error.value)
    assert not run.run.export.exists() and not list(run.run.root.glob(".export*"))


def test_markov_rank_below_one_is_refused(shape):
    with pytest.raises(ValueError, match="markov_rank=0: SGLang needs at least 1"):
        refuse(DrafterConfig(**{**shape, "markov_rank": 0}), "bfloat16", "sglang", TargetFacts())


def test_hf_allows_the_last_layer_and_float32(made):
    run = made({"to": "hf", "dtype": "float32"}, taps=(1, 3, 7))
    folder = export(run.config, run.run, run.checkpoint)
    assert export_gate(folder, run.drafter).passed
    assert "sglang.launch_server" not in (folder / "README.md").read_text()


def test_not_finite_weights_are_refused(made):
    run = made()
    path = run.checkpoint / "drafter.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"][0, 0] = float("inf")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"fc\.weight is not finite"):
        export(run.config, run.run, run.checkpoint)
    with pytest.raises(ValueError, match="holds no drafter"):
        export(run.config, run.run, run.checkpoint / "absent")


# --- the folder


def test_an_older_export_is_replaced_whole(made):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    (folder / "model.safetensors").write_bytes(b"old")
    export(run.config, run.run, run.checkpoint)
    assert export_gate(folder, run.drafter).passed
    assert not list(run.run.root.glob(".export*"))


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "sub"])
def test_foreign_files_are_never_deleted(made, name):
    """faults.md U2: a folder that export did not write, or that holds more than export writes."""
    run = made()
    run.run.export.mkdir()
    if name == "sub":
        (run.run.export / name).mkdir()
    else:
        (run.run.export / name).write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        export(run.config, run.run, run.checkpoint)
    assert [path.name for path in run.run.export.iterdir()] == [name]


def test_notes_added_to_an_export_are_kept(made):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, which export did not write"):
        export(run.config, run.run, run.checkpoint)
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "model.safetensors").read_bytes() == before


def test_a_full_disk_leaves_the_older_export(made, monkeypatch):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        export(run.config, run.run, run.checkpoint)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(run.run.root.glob(".export*"))


def test_what_a_kill_left_is_cleared(made):
    run = made()
    stale = run.run.root / ".export.99.tmp"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    export(run.config, run.run, run.checkpoint)
    assert not stale.exists()


# --- card and provenance


def test_card_and_provenance(made):
    run = made()
    run.target_says()
    folder = export(run.config, run.run, run.checkpoint)
    card = (folder / "README.md").read_text()
    assert "--speculative-algorithm DSPARK" in card and "Nothing was measured" in card and "1, 3, 5 of 8" in card
    record = json.loads((folder / "provenance.json").read_text())
    assert record["step"] == 120 and record["trained"]["provenance"] == {"commit": "abc"}
    assert record["target"] == {"id": "smollm2", "weights": "w" * 64}
    assert len(record["sha256"]) == len(record["checkpoint_sha256"]) == 64
    assert record["config"]["export"]["to"] == "sglang" and record["config"]["export"]["dtype"] == "bfloat16"


def test_card_has_the_numbers_of_this_checkpoint_only(made):
    run = made()
    part = {"accept_length": 1.7241, "accept_length_pooled": 1.69, "predicted_accept_length": 1.688, "requests": 100}
    same = {"prompts": 100, "mismatches": 0, "ties": 2}
    measured = {
        "settings": {"weights": digest(run.checkpoint / "drafter.safetensors"), "dtype": "float32"}, "t0": part | {"lossless": same}, "t1": part
    }  # fmt: skip
    write_json(run.run.evaluation, measured)
    card = (export(run.config, run.run, run.checkpoint) / "README.md").read_text()
    assert "| 0 | 1.724 | 1.690 | 1.688 | 100 |" in card
    assert "0 mismatches and 2 ties on 100 prompts" in card
    measured["settings"]["weights"] = "of weights that were in this folder before"
    write_json(run.run.evaluation, measured)
    card = (export(run.config, run.run, run.checkpoint) / "README.md").read_text()
    assert "Nothing was measured" in card and "1.724" not in card
