"""Embedding, head and final norm of a checkpoint without its layers: the tensors that the loaded target has, or a refusal by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraft.config import RunConfig
from specgraft.drafters.shared import Shared
from specgraft.targets.load import identity, load_target
from specgraft.targets.outer import load_outer
from specgraft.train.setup import drafter_config

FILE = "model.safetensors"


def changed(tiny_folder: Path, folder: Path, change: Any, **config: Any) -> Path:
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / FILE)
    save_file(change(tensors), folder / FILE, metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def assert_same(folder: Path, dtype: str = "float32") -> None:
    whole, outer = load_target(str(folder), dtype, "cpu"), load_outer(str(folder), dtype, "cpu")
    assert torch.equal(outer.embedding.weight, whole.embedding.weight) and torch.equal(outer.head.weight, whole.head.weight)
    states = torch.randn(5, whole.hidden_size).to(whole.dtype)
    assert torch.equal(outer.final_norm(states), whole.final_norm(states))
    for name in ("num_layers", "hidden_size", "vocab_size", "dtype", "end_ids", "context", "streams"):
        assert getattr(outer, name) == getattr(whole, name), name
    assert not any(parameter.requires_grad for parameter in outer.final_norm.parameters())
    config = RunConfig.model_validate({"target": {"mask_token_id": 267}, "drafters": {"layers": 1}})
    outer_as: Any = outer
    assert drafter_config(config, outer_as, [0, 1]) == drafter_config(config, whole, [0, 1])
    assert torch.equal(Shared.of(outer, 267).head, Shared.of(whole, 267).head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_outer_parts_are_the_targets(tiny_folder: Path, dtype: str) -> None:
    assert_same(tiny_folder, dtype)


def test_a_tied_head_is_the_embedding(tiny_folder: Path, tmp_path: Path) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors.items() if name != "lm_head.weight"}

    folder = changed(tiny_folder, tmp_path / "t", untie, tie_word_embeddings=True)
    assert_same(folder)
    outer = load_outer(str(folder), "float32", "cpu")
    assert outer.head.weight is outer.embedding.weight
    broken = changed(tiny_folder, tmp_path / "b", untie)
    with pytest.raises(ValueError, match=r"its weights hold no lm_head\.weight.*there are model\.embed_tokens\.weight"):
        load_outer(str(broken), "float32", "cpu")


def test_several_files_and_only_those_of_the_outer_parts_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "t")
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    layers = {name: value for name, value in tensors.items() if ".layers." in name}
    save_file(layers, folder / "a.safetensors", metadata={"format": "pt"})
    save_file({name: value for name, value in tensors.items() if name not in layers}, folder / "b.safetensors", metadata={"format": "pt"})
    places = {name: "a.safetensors" if name in layers else "b.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same(folder)
    (folder / "a.safetensors").write_bytes(b"not read")
    load_outer(str(folder), "float32", "cpu")


def test_names_of_a_model_inside_another_are_found_and_other_names_refused(tiny_folder: Path, tmp_path: Path) -> None:
    inside = changed(tiny_folder, tmp_path / "i", lambda tensors: {name.replace("model.", "model.language_model."): value for name, value in tensors.items()})
    outer, whole = load_outer(str(inside), "float32", "cpu"), load_target(str(tiny_folder), "float32", "cpu")
    assert torch.equal(outer.embedding.weight, whole.embedding.weight)
    other = changed(tiny_folder, tmp_path / "o", lambda tensors: {name.replace("embed_tokens", "table"): value for name, value in tensors.items()})
    with pytest.raises(ValueError, match=r"hold no model\.embed_tokens\.weight; there are .*model\.table\.weight"):
        load_outer(str(other), "float32", "cpu")


def test_shapes_and_numbers_are_looked_at(tiny_folder: Path, tmp_path: Path) -> None:
    short = changed(tiny_folder, tmp_path / "s", lambda tensors: {**tensors, "model.norm.weight": torch.ones(31)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \(31,\), and its architecture has \(32,\)"):
        load_outer(str(short), "float32", "cpu")
    empty = changed(tiny_folder, tmp_path / "e", lambda tensors: {**tensors, "model.norm.weight": torch.full((32,), float("nan"))})
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds no numbers"):
        load_outer(str(empty), "float32", "cpu")


def test_its_identity_is_what_was_found_where_the_target_is(tiny_folder: Path) -> None:
    outer: Any = load_outer(str(tiny_folder), "float32", "cpu")
    outer.given_identity = identity(load_target(str(tiny_folder), "float32", "cpu"))
    assert identity(outer) == outer.given_identity and outer.given_identity["weights"]
