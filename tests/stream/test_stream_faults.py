"""Faults of streams that users of such tools met (S2, S3, S5 of the design's list): refused by name, or counted, never trained on."""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from media import HEADER, conversations, digests, features
from safetensors.torch import save_file

from specgraft.stream import shards
from specgraft.stream.shards import ShardReader, ShardWriter
from specgraft.train.batch import step_batches, step_rows

ROWS = conversations(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three train shards of two rows."""
    writer = ShardWriter(tmp_path / "features", HEADER)
    for first in (0, 2, 4):
        mine = ROWS[first : first + 2]
        writer.add("train", [features(row) for row in mine], list(digests(mine).values()))
    return tmp_path / "features"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def header_alone(path: Path) -> None:
    """What a slow writer has written when somebody looks: the rest reads as zeros."""
    data = path.read_bytes()
    path.write_bytes(data[:600] + bytes(len(data) - 600))


def foreign(path: Path) -> None:
    save_file({"taps": torch.ones(3)}, path)


def absent(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [cut, flipped, header_alone, foreign, absent])
def test_s2_a_harmed_shard_is_refused_by_name_and_the_others_go_on_where_bad_rows_are_skipped(folder: Path, harm: Any) -> None:
    harm(folder / "train-00001.safetensors")
    stops = ShardReader(folder, "train", HEADER, digests(ROWS)).rows([0, 4, 3, 1])
    assert [next(stops).prompt_id, next(stops).prompt_id] == ["p0", "p4"]
    with pytest.raises(ValueError, match=r"train-00001\.safetensors: (damaged shard|shard missing)"):
        next(stops)
    longer = conversations(200)
    reader = ShardReader(folder, "train", HEADER, digests(ROWS), bad_rows="skip")
    reader._bad.limit = 2 * len(longer) // 100  # as of 200 rows
    assert [row and row.prompt_id for row in reader.rows([0, 2, 4, 3, 2])] == ["p0", None, "p4", None, None]
    assert reader.facts()["skipped"] == 2


def test_s2_bytes_of_a_harmed_shard_reach_no_tensor(folder: Path) -> None:
    path = folder / "train-00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + b"\x7f" * (size - size // 2))
    reader = ShardReader(folder, "train", HEADER, digests(ROWS), bad_rows="skip")
    reader._bad.limit = 2
    for row in reader.rows(range(6)):
        assert row is None or torch.equal(row.taps, features(ROWS[int(row.prompt_id[1:])]).taps)


def test_s2_a_reader_beside_a_slow_writer_sees_whole_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, slow = tmp_path / "features", threading.Event()

    def in_two_parts(tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path, metadata=metadata)
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        slow.set()
        time.sleep(0.5)
        path.write_bytes(whole)

    writer = ShardWriter(folder, HEADER)
    writer.add("train", [features(ROWS[0])], [digests(ROWS)["p0"]])
    monkeypatch.setattr(shards, "save_file", in_two_parts)
    thread = threading.Thread(target=lambda: writer.add("train", [features(ROWS[1])], [digests(ROWS)["p1"]]))
    thread.start()
    assert slow.wait(10)
    assert [row.prompt_id for row in ShardReader(folder, "train", HEADER, digests(ROWS)).rows([0])] == ["p0"]
    thread.join()
    assert [row.prompt_id for row in ShardReader(folder, "train", HEADER, digests(ROWS)).rows([1, 0])] == ["p1", "p0"]


def test_s2_a_file_system_without_locks_is_refused_naming_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"features: its file system takes no lock \(Operation not supported\); set run\.root"):
        ShardWriter(tmp_path / "features", HEADER)


def test_s3_a_step_trains_on_the_rows_that_are_left_and_its_number_stays(folder: Path) -> None:
    """The order is that of all rows, so that every rank skips alike; a step of which nothing is left stops the run."""
    cpu = torch.device("cpu")
    whole = list(step_batches(ShardReader(folder, "train", HEADER, digests(ROWS)), 3, 2, 2, 64, 0, 0, 4, cpu))
    cut(folder / "train-00001.safetensors")
    reader = ShardReader(folder, "train", HEADER, digests(ROWS), bad_rows="skip")
    reader._bad.limit = 2
    found = list(step_batches(reader, 3, 2, 2, 64, 0, 0, 4, cpu))
    assert len(found) == len(whole)
    for step, (all_rows, rest) in enumerate(zip(whole, found, strict=True)):
        lost = sum(index in (2, 3) for index in step_rows(6, 3, 0, step))
        assert rest.texts.input_ids.shape[0] == all_rows.texts.input_ids.shape[0] - lost
    alone = ShardReader(folder, "train", HEADER, {"p2": digests(ROWS)["p2"]}, bad_rows="skip")
    with pytest.raises(ValueError, match=r"all 3 rows of step 1 were left out as bad"):
        list(step_batches(alone, 3, 2, 2, 64, 0, 0, 1, cpu))


def test_more_than_one_bad_row_in_a_hundred_stops_a_run_that_skips(folder: Path) -> None:
    cut(folder / "train-00001.safetensors")
    reader = ShardReader(folder, "train", HEADER, digests(ROWS), bad_rows="skip")
    with pytest.raises(ValueError, match=r"2 bad rows, 1 are admitted \(1 %\); the last: .*train-00001"):
        list(reader.rows(range(6)))
