"""Shards hold what was put in, bit for bit; what is damaged, missing or another target's is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.records import Features
from specgraft.stream.shards import MANIFEST, ShardReader, ShardWriter

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
