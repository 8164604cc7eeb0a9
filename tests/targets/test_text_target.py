"""The text side of a target: the same tokens as the loaded one, no weights, digests that follow what they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import normalizers

from specgraft.targets.load import load_target
from specgraft.targets.text import load_text, template_digest, text_identity, tokenizer_digest


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_the_text_side_has_the_tokens_and_ends_of_the_loaded_target(tiny_folder: Path) -> None:
    text, whole = load_text(str(tiny_folder)), load_target(str(tiny_folder), "float32")
    assert text.end_ids == whole.end_ids and text.context == whole.context == 256
    assert tokenizer_digest(text.tokenizer) == tokenizer_digest(whole.tokenizer)
    messages = [{"role": "user", "content": "ab"}]
    assert text.tokenizer.apply_chat_template(messages) == whole.tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("ends", [[262, 260], 260])
def test_list_valued_ends_are_all_ends_with_and_without_weights(copy: Path, ends: int | list[int]) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    mine = load_text(str(copy))
    assert set(mine.end_ids) == {mine.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    assert mine.end_ids == load_target(str(copy), "float32").end_ids
    path.unlink()  # then the model config's
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    assert load_text(str(copy)).end_ids == mine.end_ids == load_target(str(copy), "float32").end_ids


def test_the_digest_of_a_tokenizer_covers_more_than_its_vocabulary(tiny_folder: Path) -> None:
    one, other = load_text(str(tiny_folder)).tokenizer, load_text(str(tiny_folder)).tokenizer
    first = tokenizer_digest(one)
    one("a call that pads and cuts", padding="max_length", truncation=True, max_length=4)
    assert tokenizer_digest(one) == first == tokenizer_digest(other)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert other.get_vocab() == one.get_vocab() and tokenizer_digest(other) != first
    one.add_tokens(["<call>"])
    assert tokenizer_digest(one) != first


def test_the_digest_of_a_template_covers_text_and_thinking(tiny_folder: Path) -> None:
    tokenizer = load_text(str(tiny_folder)).tokenizer
    digests = {template_digest(tokenizer, thinking) for thinking in ("template", "on", "off")}
    tokenizer.chat_template += " "
    assert len(digests | {template_digest(tokenizer)}) == 4


def test_the_identity_of_a_folder_changes_with_its_weight_files(copy: Path) -> None:
    first = text_identity(load_text(str(copy)))
    assert text_identity(load_text(str(copy))) == first
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b" ")
    now = text_identity(load_text(str(copy)))
    assert {key for key in first if now[key] != first[key]} == {"weight_files"}


def test_what_cannot_be_read_is_one_line(copy: Path) -> None:
    for path, words in (("model.safetensors", "no weight files"), ("chat_template.jinja", "no chat template"), ("config.json", "no config.json")):
        (copy / path).unlink()
        if path == "chat_template.jinja":
            shutil.copy(copy / "config.json", copy / "model.safetensors")  # any file: it is not read, only hashed
        with pytest.raises(ValueError, match=words) as caught:
            load_text(str(copy))
        assert "\n" not in str(caught.value)
