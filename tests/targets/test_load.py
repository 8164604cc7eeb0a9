"""What can be loaded as a target, and that what cannot is refused in one line that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from specgraft.targets import embedded
from specgraft.targets.load import identity, load_target, pick_device, refuse_unsupported, resolve
from specgraft.targets.model import end_ids


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def refusal(folder: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        load_target(str(folder), "float32")
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_a_folder_loads_with_its_weights_tokenizer_and_end_token(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), "float32")
    stored = load_file(tiny_folder / "model.safetensors")
    loaded = target.model.state_dict()
    assert set(stored) == set(loaded) and all(torch.equal(stored[name], loaded[name]) for name in stored)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 288)
    assert target.tokenizer.convert_ids_to_tokens(list(target.end_ids)) == ["<|end|>"]
    assert target.tokenizer.encode("ab") == [256]
    assert load_target(str(tiny_folder)).dtype == torch.bfloat16


def test_identity_changes_with_weights_template_and_dtype_only(copy: Path) -> None:
    first = identity(load_target(str(copy), "float32"))
    assert identity(load_target(str(copy), "float32")) == first

    def changed() -> set[str]:
        now = identity(load_target(str(copy), "float32"))
        return {key for key in first if now[key] != first[key]}

    assert {key for key, value in identity(load_target(str(copy))).items() if value != first[key]} == {"dtype", "weights"}
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert changed() == {"chat_template"}
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert changed() == {"chat_template", "weights"}


def test_a_tensor_that_is_not_found_is_refused_not_filled_at_random(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["backbone.embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    message = refusal(copy)
    assert "model.embed_tokens.weight" in message and "backbone.embeddings.weight" in message


def test_a_tensor_of_another_shape_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    refusal(copy)


def test_damaged_weights_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "could not be loaded" in refusal(copy)


def test_an_architecture_with_other_names_is_refused_in_one_line(copy: Path) -> None:
    shape = GPT2Config(vocab_size=288, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=1)
    (copy / "config.json").unlink()
    GPT2LMHeadModel(shape).save_pretrained(copy)
    message = refusal(copy)
    assert "gpt2 has no decoder layers and final norm" in message and "\n" not in message


def test_a_folder_without_model_or_template_is_refused(copy: Path, tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path / "nothing")
    (copy / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(copy)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}', "{}"])
def test_a_config_that_says_nothing_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "could not be loaded" in refusal(copy)


def test_a_hybrid_that_has_no_row_is_refused_on_loading(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"layer_types": ["linear_attention"] * config["num_hidden_layers"]}
    (copy / "config.json").write_text(json.dumps(config))
    assert "linear_attention layers are not served in process yet" in refusal(copy)


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ValueError, match=r"run\.device='tpuu'"):
        pick_device("tpuu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device here"):
            pick_device("cuda:1")


def test_a_hub_id_is_left_as_it_is_and_a_path_is_not_taken_for_one(tmp_path: Path) -> None:
    assert resolve("org/model") == "org/model"
    for name in ("./org/model", str(tmp_path)):
        with pytest.raises(ValueError, match=r"no config\.json there"):
            resolve(name)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SimpleNamespace(model_type="a", layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (SimpleNamespace(model_type="b", layer_types=["full_attention", "conv"]), "conv"),
        (SimpleNamespace(model_type="c", layer_types=["indexed_attention"]), "indexed_attention"),
        (SimpleNamespace(model_type="d", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (SimpleNamespace(model_type="e", final_logit_softcapping=30.0), "final_logit_softcapping"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_attention_that_is_not_served_is_refused_by_name(config: SimpleNamespace, named: str) -> None:
    with pytest.raises(ValueError, match=f"target {config.model_type}: .*{named}"):
        refuse_unsupported(config)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(), Qwen3Config(), Qwen2Config(), MistralConfig(sliding_window=4096), GptOssConfig()],
    ids=lambda config: type(config).__name__,
)
def test_full_and_sliding_attention_targets_are_accepted(config: object) -> None:
    refuse_unsupported(config)


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [(264, 261, (261, 264)), ([264, 261], 261, (261, 264)), (None, 7, (7,)), ([0], None, (0,)), ([5, 3], [3, 9], (3, 5, 9))],
)
def test_every_end_token_counts(generation: object, tokenizer: object, expected: tuple[int, ...]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert end_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_a_target_without_end_token_is_refused() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    with pytest.raises(ValueError, match="no end token"):
        end_ids(model, SimpleNamespace(eos_token_id=None))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SPECGRAFT_CACHE", raising=False)
    assert embedded.cache_root() == tmp_path / "xdg" / "specgraft"
    monkeypatch.setenv("SPECGRAFT_CACHE", str(tmp_path / "own"))
    assert embedded.cache_root() == tmp_path / "own"
    monkeypatch.setattr(embedded, "smollm2_gguf", lambda: None)
    assert embedded.smollm2_folder() == embedded.HUB_ID  # no package, nothing converted: the hub id


def test_an_unwritable_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set SPECGRAFT_CACHE"):
        embedded.convert(tmp_path / "model.gguf", tmp_path / "file" / "below")


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import transformers

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ValueError, match="No space left on device"):
        embedded.convert(tmp_path / "model.gguf", tmp_path / "cache" / "folder")
    assert list((tmp_path / "cache").iterdir()) == []
