"""Exports for vLLM and llama.cpp: every kind that an engine loads, read back and equal; what a GGUF file says; what is refused."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specgraft.check.export import export as export_gate
from specgraft.drafters.layouts import registry as layouts
from specgraft.export.gguf_file import NAME, read
from specgraft.export.reload import load_export
from specgraft.export.stage import export
from specgraft.export.support import unsupported
from specgraft.export.vocabulary import DraftVocabulary, commonest

DFLASH = {"kind": "dflash", "markov_rank": 0, "confidence": False}
DFLASH2 = DFLASH | {"kind": "dflash2", "conv_group": 16, "selector_rank": 8, "selector_top_k": 4}
SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 16}
FORMS = {
    "dspark": {}, "no confidence": {"confidence": False}, "dflash": DFLASH, "dflash2": DFLASH2, "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"}, "sliding": SLIDING, "causal": {"block_causal": True}, "sliding dflash": DFLASH | SLIDING,
}  # fmt: skip
SERVED = {
    "sglang": {"dspark", "no confidence", "dflash", "dflash2", "gated", "rnn", "sliding", "causal", "sliding dflash"},
    "vllm": {"dspark", "no confidence", "dflash", "dflash2"},
    "llamacpp": {"dspark", "no confidence", "dflash", "dflash2", "causal"},
    "hf": set(FORMS),
}


@pytest.fixture
def tokenizer(tmp_path):
    """A target's .gguf that holds a tokenizer and nothing else."""
    path = tmp_path / "target.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{number}" for number in range(272)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(261)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def vocabulary_of(size: int = 40) -> DraftVocabulary:
    ids = torch.randperm(272, generator=torch.Generator().manual_seed(1))[:size].sort().values
    return DraftVocabulary(ids, torch.randn(size, 64, generator=torch.Generator().manual_seed(2)), 0.93)


@pytest.mark.parametrize("to", SERVED)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_back_equal_or_refused(made, tokenizer, to, name):
    run = made({"to": to}, **FORMS[name])
    run.target_says()
    if name not in SERVED[to]:
        with pytest.raises(ValueError, match=r"train (with|again)|use export\.to") as error:
            export(run.config, run.run, run.checkpoint, target_gguf=tokenizer)
        assert "\n" not in str(error.value) and not run.run.export.exists()
        return
    folder = export(run.config, run.run, run.checkpoint, target_gguf=tokenizer)
    result = export_gate(folder, run.drafter)
    assert result.passed, result.detail
    card = (folder / "README.md").read_text()
    words = {"sglang": "sglang.launch_server", "vllm": "--speculative-config", "llamacpp": "--spec-type", "hf": "plain files"}
    assert all((word in card) == (engine == to) for engine, word in words.items())


def test_dflash_is_zlabs_layout_and_counts_the_anchor(made):
    """Other projects' reader of that layout takes the folder, too: block_size counts inputs, ids are 0-based."""
    run = made({"to": "vllm", "dtype": "float32"}, **DFLASH)
    folder = export(run.config, run.run, run.checkpoint)
    data = json.loads((folder / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"] and data["block_size"] == 6 and data["is_causal"] is False
    assert data["dflash_config"] == {"mask_token_id": 265, "target_layer_ids": [1, 3, 5]}
    again = layouts.read(folder)
    assert again.config.draft_tokens == 5
    assert all(torch.equal(again.state_dict()[name], value) for name, value in run.drafter.state_dict().items())


def test_gguf_keys_and_tensors_spelt_out(made, tokenizer):
    """contracts/llamacpp.md 1: ids one higher than ours, [out, in] matrices, vectors in float32, no embedding and no head."""
    run = made({"to": "llamacpp"})
    folder = export(run.config, run.run, run.checkpoint, target_gguf=tokenizer)
    reader = gguf.GGUFReader(folder / NAME)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "dflash", "dflash.block_count": 2, "dflash.context_length": 4096, "dflash.embedding_length": 64,
        "dflash.feed_forward_length": 96, "dflash.attention.head_count": 4, "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 32, "dflash.attention.value_length": 32, "dflash.rope.freq_base": 1e6,
        "dflash.block_size": 5, "dflash.target_layers": [2, 4, 6], "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True, "dflash.attention.causal": False, "tokenizer.ggml.mask_token_id": 265,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.eos_token_id": 261,
    }  # fmt: skip
    assert {key: fields[key] for key in expected} == expected
    assert fields["dflash.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6) and len(fields["tokenizer.ggml.tokens"]) == 272
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {
        "fc.weight": [192, 64], "enc.output_norm.weight": [64], "output_norm.weight": [64], "markov_w1.weight": [16, 272],
        "markov_w2.weight": [16, 272], "conf_proj.weight": [80, 1], "conf_proj.bias": [1],
    }  # fmt: skip
    layer = {
        "attn_norm": [64], "ffn_norm": [64], "attn_q": [64, 128], "attn_k": [64, 64], "attn_v": [64, 64], "attn_output": [128, 64],
        "attn_q_norm": [32], "attn_k_norm": [32], "ffn_gate": [64, 96], "ffn_up": [64, 96], "ffn_down": [96, 64],
    }  # fmt: skip
    shapes |= {f"blk.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    assert {name: [int(n) for n in tensor.shape] for name, tensor in tensors.items()} == shapes
    assert tensors["fc.weight"].tensor_type.name == "BF16" and tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    ours = run.drafter.state_dict()["layers.1.self_attn.q_proj.weight"].to(torch.bfloat16).float()
    stored = gguf.quants.dequantize(tensors["blk.1.attn_q.weight"].data, tensors["blk.1.attn_q.weight"].tensor_type)
    assert np.array_equal(stored, ours.numpy())


@pytest.mark.parametrize("kind", [DFLASH, DFLASH2])
def test_gguf_block_size_of_dflash_counts_the_anchor(made, tokenizer, kind):
    run = made({"to": "llamacpp"}, **kind)
    folder = export(run.config, run.run, run.checkpoint, target_gguf=tokenizer)
    fields = gguf.GGUFReader(folder / NAME).fields
    assert fields["dflash.block_size"].contents() == 6 and "dflash.sample_from_anchor" not in fields
    assert ("dflash.selector_rank" in fields) == (kind is DFLASH2)


def test_gguf_of_another_schema_or_with_a_changed_key_is_refused(made, tokenizer, monkeypatch):
    run = made({"to": "llamacpp"})
    folder = export(run.config, run.run, run.checkpoint, target_gguf=tokenizer)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"specgraft\.schema is 'llama.cpp b11434, 1', this version knows"):
        patch.setattr("specgraft.export.gguf_file.VERSION", "llama.cpp b99999, 2")
        read(folder / NAME)
    import specgraft.export.gguf_file as module

    true = module.metadata
    monkeypatch.setattr(module, "metadata", lambda c: true(c) | {"dflash.block_size": ("U32", 9)})
    with pytest.raises(ValueError, match=r"dflash\.block_size is 5, the contract wants 9"):
        load_export(folder)


def test_the_tokenizer_is_written_from_the_targets_folder(made):
    run = made({"to": "llamacpp"})
    run.target_says(vocab_size=272)
    words = {f"w{number}": number for number in range(266)}
    added = [{"content": "<|end|>", "id": 261, "special": True}, {"content": "<x>", "id": 262, "special": False}]
    data = {"model": {"type": "BPE", "vocab": words, "merges": [["a", "b"], "c d"]}, "added_tokens": added}
    (run.run.root / "target" / "tokenizer.json").write_text(json.dumps(data))
    folder = export(run.config, run.run, run.checkpoint)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(folder / NAME).fields.items()}
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == 272 and tokens[0] == "w0" and tokens[261] == "<|end|>" and tokens[271] == "[PAD271]"
    assert (types[0], types[261], types[262], types[271]) == (1, 3, 4, 5)
    assert fields["tokenizer.ggml.merges"] == ["a b", "c d"]


def test_without_any_tokenizer_it_says_what_to_set(made, tmp_path):
    run = made({"to": "llamacpp"})
    run.target_says()
    with pytest.raises(ValueError, match=r"tokenizer\.json: holds no BPE tokenizer; set export\.target_gguf"):
        export(run.config, run.run, run.checkpoint)
    with pytest.raises(ValueError, match=r"absent\.gguf: no such file; set export\.target_gguf"):
        export(run.config, run.run, run.checkpoint, target_gguf=str(tmp_path / "absent.gguf"))
    assert not run.run.export.exists()


# --- draft vocabulary


def test_e1_vocabulary_maps_are_in_the_file_in_the_engines_form(made, tokenizer):
    """faults.md E1: offsets d2t and boolean t2d for vLLM, absolute ids for llama.cpp; a draft id decodes to its target id."""
    some = DraftVocabulary(torch.tensor([5, 9, 100]), torch.randn(3, 64), 1.0)
    run = made({"to": "vllm", "vocabulary": 3}, **DFLASH)
    tensors = load_file(export(run.config, run.run, run.checkpoint, vocabulary=some) / "model.safetensors")
    assert tensors["d2t"].tolist() == [5, 8, 98] and tensors["t2d"].nonzero()[:, 0].tolist() == [5, 9, 100]
    assert torch.equal(tensors["lm_head.weight"], some.head.to(torch.bfloat16))
    assert json.loads((run.run.export / "config.json").read_text())["draft_vocab_size"] == 3
    folder = run.run.root / "llamacpp"
    config = run.config.model_copy(update={"export": run.config.export.model_copy(update={"to": "llamacpp"})})
    export(config, run.run, run.checkpoint, folder, some, tokenizer)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / NAME).tensors}
    assert list(tensors["d2t"].data) == [5, 9, 100] and [int(n) for n in tensors["output.weight"].shape] == [64, 3]


@pytest.mark.parametrize("to", ["vllm", "llamacpp", "hf"])
def test_a_pruned_drafter_scores_the_kept_ids_as_before(made, tokenizer, to):
    """Logits of the kept ids are those of the whole drafter: head rows, and Markov bias."""
    run, some = made({"to": to, "vocabulary": 40}), vocabulary_of()
    folder = export(run.config, run.run, run.checkpoint, vocabulary=some, target_gguf=tokenizer)
    assert export_gate(folder, run.drafter).passed
    found = load_export(folder)
    assert found.ids is not None and torch.equal(found.ids, some.ids)
    assert found.head is not None and torch.equal(found.head.float(), some.head.to(torch.bfloat16).float())
    before, after = run.drafter.markov_head.markov_w2.weight, found.drafter.markov_head.markov_w2.weight
    assert torch.equal(after[some.ids], before[some.ids].to(torch.bfloat16).float())
    left_out = torch.ones(272, dtype=torch.bool).scatter(0, some.ids, False)
    assert after[left_out].abs().max() == 0
    assert "| ids proposed | 40, 93.0% of the answers' tokens |" in (folder / "README.md").read_text()


def test_the_gate_sees_maps_that_disagree(made):
    run, some = made({"to": "vllm", "vocabulary": 40}), vocabulary_of()
    folder = export(run.config, run.run, run.checkpoint, vocabulary=some)
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][3] += 1
    save_file(tensors, folder / "model.safetensors")
    result = export_gate(folder, run.drafter)
    assert not result.passed and "different ids" in result.detail


def test_commonest_ids_by_hand():
    texts = [[7, 7, 7, 3], [3, 9, 7]]
    assert commonest(texts, {11}, 3, 12) == ([3, 7, 11], 6 / 7)
    assert commonest(texts, {11}, 6, 12) == ([0, 1, 3, 7, 9, 11], 1.0)  # lowest ids fill up
    assert commonest([], set(), 2, 12) == ([0, 1], 0.0)
    with pytest.raises(ValueError, match="2 end tokens alone are more"):
        commonest(texts, {1, 2}, 1, 12)


# --- targets


@pytest.mark.parametrize(
    ("to", "kind", "target", "words"),
    [
        ("sglang", "dflash", "solar_open", "sglang hands out no hidden states of a solar_open target: use export.to='vllm' or 'hf'"),
        ("sglang", "dflash", "kimi_linear", "sglang hands out"),
        ("sglang", "dspark", "kimi_linear", ""),
        ("sglang", "dspark", "gemma4", "sglang multiplies a gemma4 target's embeddings before a drafter reads them"),
        ("sglang", "dspark", "qwen4_exp", "use export.to='llamacpp' or 'vllm' or 'hf'"),
        ("llamacpp", "dspark", "qwen2", "use export.to='vllm' or 'hf'"),
        ("llamacpp", "dspark", "llama", ""),
        ("vllm", "dspark", "anything", ""),
        ("sglang", "dspark", None, ""),
    ],
)
def test_targets_that_an_engine_cannot_read(to, kind, target, words):
    assert words in unsupported(to, kind, target) and bool(words) == bool(unsupported(to, kind, target))


def test_an_unreadable_target_is_refused_before_anything_is_written(made):
    run = made({"to": "sglang"})
    run.target_says(model_type="solar_open")
    with pytest.raises(ValueError, match="no hidden states of a solar_open target"):
        export(run.config, run.run, run.checkpoint)
    assert not run.run.export.exists()
