"""Shards hold what was put in, bit for bit; what is damaged, missing or another target's is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specgraft.records import Features
from specgraft.stream import fp8
from specgraft.stream.shards import KEY, MANIFEST, ShardReader, ShardWriter

HEADER: dict[str, Any] = {"target": {"id": "t", "weights": "abc"}, "taps": [1, 3], "hidden_size": 8}


def row(number: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Features:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 50_000, (length,), generator=generator)
    mask = torch.rand(length, generator=generator) < 0.5
    taps = (1e3 * torch.randn(length, 2, 8, generator=generator)).to(dtype)
    return Features(f"p{number}", ids, mask, taps, torch.randn(length, 8, generator=generator).to(dtype))


def digests(rows: list[Features]) -> list[str]:
    return [features.prompt_id for features in rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two train shards of two rows, one held-out shard."""
    folder = tmp_path / "features"
    writer = ShardWriter(folder, HEADER)
    for split, numbers in (("train", (0, 1)), ("heldout", (2,)), ("train", (3, 4))):
        rows = [row(number, 5 + 3 * number) for number in numbers]
        writer.add(split, rows, digests(rows))
    return folder


def refusal(folder: Path, index: int = 0, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        ShardReader(folder, "train", **settings)[index]
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_bit_for_bit_in_order(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = [row(number, 1 + 7 * number, dtype) for number in range(5)]
    writer = ShardWriter(tmp_path, HEADER)
    writer.add("train", rows[:3], digests(rows[:3]))
    writer.add("train", rows[3:], digests(rows[3:]))
    reader = ShardReader(tmp_path, "train", HEADER)
    assert len(reader) == 5 and reader.lengths == [1, 8, 15, 22, 29]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for index in (4, 0, 2, 1, 3):
        found, put = reader[index], rows[index]
        assert found.prompt_id == put.prompt_id and torch.equal(found.input_ids, put.input_ids)
        assert found.input_ids.dtype == torch.int64 and found.loss_mask.dtype == torch.bool
        assert torch.equal(found.loss_mask, put.loss_mask)
        assert found.taps.dtype == found.last.dtype == dtype
        assert torch.equal(found.taps.view(bits), put.taps.view(bits))
        assert torch.equal(found.last.view(bits), put.last.view(bits))


def test_splits_are_apart_and_a_reader_keeps_only_the_rows_asked_for(folder: Path) -> None:
    assert [entry[2] for entry in ShardReader(folder, "train").index] == ["p0", "p1", "p3", "p4"]
    assert [entry[2] for entry in ShardReader(folder, "heldout").index] == ["p2"]
    some = ShardReader(folder, "train", keep={name: name for name in ("p1", "p4", "p2")})
    assert [some[index].prompt_id for index in range(len(some))] == ["p1", "p4"]
    assert torch.equal(some[1].taps, row(4, 17).taps)


def test_a_writer_opened_again_goes_on_behind_the_shards_that_are_there(folder: Path) -> None:
    writer = ShardWriter(folder, HEADER)
    assert set(writer.digests) == {"p0", "p1", "p2", "p3", "p4"}
    writer.add("train", [row(5, 4)], ["p5"])
    assert [shard["file"] for shard in writer.manifest["shards"]] == [
        "train-00000.safetensors", "heldout-00000.safetensors", "train-00001.safetensors", "train-00002.safetensors",
    ]  # fmt: skip
    assert ShardReader(folder, "train")[4].prompt_id == "p5"


def test_a_flipped_byte_is_found_by_the_checksum(folder: Path) -> None:
    path = folder / "train-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert ShardReader(folder, "train")[1].prompt_id == "p1"  # the other shard is whole
    message = refusal(folder, 2)
    assert "train-00001.safetensors: damaged shard (size or checksum" in message and "run capture again" in message


def test_a_truncated_shard_is_refused(folder: Path) -> None:
    path = folder / "train-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged shard" in refusal(folder)


def test_a_shard_whose_checksum_agrees_but_which_is_no_safetensors_file_is_refused(folder: Path) -> None:
    import hashlib

    path = folder / "train-00000.safetensors"
    path.write_bytes(b"\xff" * 64)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0] |= {"bytes": 64, "sha256": hashlib.sha256(b"\xff" * 64).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "damaged shard" in refusal(folder)


def test_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / "train-00000.safetensors").unlink()
    assert "train-00000.safetensors: shard missing" in refusal(folder)


def test_a_missing_or_damaged_manifest_is_refused(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 1, "sha')
    assert "damaged" in refusal(folder)
    (folder / MANIFEST).unlink()
    assert "missing" in refusal(folder)


def test_a_split_without_rows_is_refused(folder: Path) -> None:
    assert "no train features; run capture first" in refusal(folder, keep={"p2"})


@pytest.mark.parametrize(
    ("key", "value"), [("taps", [1, 4]), ("target", {"id": "t", "weights": "other"}), ("hidden_size", 9), ("absent", 1)]
)
def test_features_of_other_settings_are_refused_naming_the_setting(folder: Path, key: str, value: Any) -> None:
    assert f"{key}=" in refusal(folder, expect={**HEADER, key: value})
    with pytest.raises(ValueError, match=f"another `{key}`"):
        ShardWriter(folder, {**HEADER, key: value})


def test_shards_of_another_format_are_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 1}))
    assert "format=1" in refusal(folder)
    with pytest.raises(ValueError, match="another `format`"):
        ShardWriter(folder, HEADER)


def test_half_written_files_are_neither_read_nor_kept(folder: Path) -> None:
    """A kill leaves a temporary file, or a renamed shard that is not in the manifest yet."""
    (folder / ".train-00002.safetensors.tmp").write_bytes(b"half")
    (folder / "train-00002.safetensors").write_bytes(b"renamed, not entered")
    assert len(ShardReader(folder, "train")) == 4
    writer = ShardWriter(folder, HEADER)
    assert not list(folder.glob(".*"))
    writer.add("train", [row(9, 6)], ["p9"])
    reader = ShardReader(folder, "train")
    assert len(reader) == 5 and torch.equal(reader[4].last, row(9, 6).last)


FP8: dict[str, Any] = {**HEADER, "target": {"id": "t", "weights": "abc", "dtype": "bfloat16"}, "dtype": "fp8"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_rows_come_back_in_the_targets_dtype_as_their_codes_say(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = [row(number, 1 + 7 * number, dtype) for number in range(4)]
    header = {**FP8, "target": {**FP8["target"], "dtype": str(dtype).removeprefix("torch.")}}
    writer = ShardWriter(tmp_path, header)
    writer.add("train", rows[:3], digests(rows[:3]))
    writer.add("train", rows[3:], digests(rows[3:]))
    reader = ShardReader(tmp_path, "train", header)
    for index in (3, 1, 0, 2):
        found, put = reader[index], rows[index]
        assert torch.equal(found.input_ids, put.input_ids) and torch.equal(found.loss_mask, put.loss_mask)
        for back, states in ((found.taps, put.taps), (found.last, put.last)):
            assert back.dtype == dtype and torch.equal(back, fp8.decode(*fp8.encode(states), dtype))
    error = reader.manifest["shards"][0]["round_trip_error"]
    assert set(error) == {"taps", "last"} and 0.01 < error["taps"]["mean"] < error["taps"]["worst"] < 1 / 16


def test_fp8_takes_a_byte_a_value_and_four_a_state(tmp_path: Path) -> None:
    ShardWriter(tmp_path, FP8).add("train", [row(1, 10)], ["p1"])
    tensors = load_file(tmp_path / "train-00000.safetensors")
    assert {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()} == {
        "input_ids": 40, "loss_mask": 10, "taps": 10 * 2 * 8, "taps_scale": 10 * 2 * 4, "last": 10 * 8, "last_scale": 10 * 4,
    }  # fmt: skip


def test_features_in_fp8_are_other_features(folder: Path, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "small", FP8)
    writer.add("train", [row(0, 5)], ["p0"])
    plain = ShardWriter(tmp_path / "plain", {**FP8, "dtype": "bfloat16"})
    plain.add("train", [row(0, 5)], ["p0"])
    assert ShardReader(tmp_path / "small", "train").digest() != ShardReader(tmp_path / "plain", "train").digest()
    with pytest.raises(ValueError, match="made with dtype=fp8, this run has bfloat16"):
        ShardReader(tmp_path / "small", "train", {**FP8, "dtype": "bfloat16"})
    with pytest.raises(ValueError, match="another `dtype`"):
        ShardWriter(tmp_path / "small", {**FP8, "dtype": "bfloat16"})
    assert "dtype=None" in refusal(folder, expect=FP8 | HEADER)  # a field that is missing is no default


@pytest.mark.parametrize("part", ["id", "weights", "tokenizer", "chat_template", "dtype"])
def test_another_target_is_refused_naming_what_differs(tmp_path: Path, part: str) -> None:
    target = {"id": "t", "weights": "a", "tokenizer": "b", "chat_template": "c", "dtype": "bfloat16"}
    header = {**HEADER, "target": target}
    ShardWriter(tmp_path, header).add("train", [row(0, 5)], ["p0"])
    other = {**header, "target": {**target, part: "other"}}
    assert f"target={{'{part}': '{target[part]}'}}, this run has {{'{part}': 'other'}}" in refusal(tmp_path, expect=other)
    with pytest.raises(ValueError, match=rf"another `target` \({part}\); use another run\.name"):
        ShardWriter(tmp_path, other)


def test_a_shard_says_what_it_holds(folder: Path) -> None:
    with safe_open(folder / "train-00001.safetensors", framework="pt") as shard:
        own = json.loads(shard.metadata()[KEY])
    assert own["target"] == HEADER["target"] and own["taps"] == [1, 3] and own["layer_ids"].endswith("pre-norm")
    assert own["split"] == "train"
    assert own["rows"] == [{"prompt_id": f"p{n}", "tokens": 5 + 3 * n, "digest": f"p{n}"} for n in (3, 4)]


@pytest.mark.parametrize(("change", "named"), [({"taps": [1, 4]}, "taps"), ({"target": None}, "target"), ({"rows": []}, "rows")])
def test_a_shard_of_other_features_under_a_manifest_is_refused(folder: Path, change: dict[str, Any], named: str) -> None:
    """Its checksum agrees: whoever put it there entered it in the manifest."""
    import hashlib

    path = folder / "train-00000.safetensors"
    with safe_open(path, framework="pt") as shard:
        own = json.loads(shard.metadata()[KEY])
    own = {key: value for key, value in {**own, **change}.items() if value is not None}
    save_file(load_file(path), path, metadata={KEY: json.dumps(own)})
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0] |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert f"its own `{named}`" in refusal(folder)


def test_rows_come_in_the_order_asked_for_wherever_they_lie(folder: Path) -> None:
    keep = {name: name for name in ("p4", "p0", "p3", "p1")}
    reader = ShardReader(folder, "train", keep=keep)
    assert [reader[index].prompt_id for index in range(4)] == ["p4", "p0", "p3", "p1"]
    assert torch.equal(reader[0].last, row(4, 17).last)


def test_notes_are_no_part_of_the_header(folder: Path) -> None:
    writer = ShardWriter(folder, HEADER)
    writer.note(left_out={"p9": "no legal anchor"})
    writer.note(cut=2)
    writer.add("train", [row(5, 4)], ["p5"])
    assert ShardReader(folder, "train").manifest["notes"] == {"left_out": {"p9": "no legal anchor"}, "cut": 2}
    assert ShardReader(folder, "train")[4].prompt_id == "p5"
