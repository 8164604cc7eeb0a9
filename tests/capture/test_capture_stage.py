"""Features of every conversation, whatever batch and shard it meets in; broken rows, interruptions and full disks."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgraft.capture import stage
from specgraft.capture.forward import capture_batch
from specgraft.capture.stage import capture, feature_bytes, feature_header
from specgraft.config import RunConfig
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run_dir import RunDir
from specgraft.stream import shards
from specgraft.stream.shards import ShardReader

TAPS = [0, 2]


def conversations(lengths: Sequence[int], held_out: int = 0) -> list[Conversation]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(2, 64, (length,), generator=generator).tolist()
        split = "heldout" if number < held_out else "train"
        found.append(
            Conversation(
                f"p{number}", "f", "en", "chat", split, ids, [False] + [True] * (length - 1), 1, 0.0, 1.0, 0, "length",
                ids_digest(ids[1:]),
            )
        )  # fmt: skip
    return found


def config_of(**capture_section: Any) -> RunConfig:
    return RunConfig.model_validate({"capture": {"taps": TAPS, **capture_section}})


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3, markov=2.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def everything(run: RunDir, *splits: str) -> dict[str, Features]:
    found = {}
    for split in splits or ("train",):
        reader = ShardReader(run.features, split)
        found |= {reader[index].prompt_id: reader[index] for index in range(len(reader))}
    return found


def files(run: RunDir) -> set[str]:
    return {path.name for path in run.features.iterdir()} if run.features.exists() else set()


def assert_same(left: Features, right: Features, exact: bool = True) -> None:
    assert left.prompt_id == right.prompt_id
    assert torch.equal(left.input_ids, right.input_ids) and torch.equal(left.loss_mask, right.loss_mask)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(left.taps, right.taps, **close)
    torch.testing.assert_close(left.last, right.last, **close)


def test_rows_of_one_batch_equal_each_row_alone_in_the_order_given(target) -> None:
    rows = conversations([3, 5, 8, 13, 21, 34, 55, 89])
    rows = [rows[index] for index in (4, 0, 7, 2, 5, 1, 3, 6)]
    together = capture_batch(target, rows, TAPS)
    assert [features.prompt_id for features in together] == [row.prompt_id for row in rows]
    for row, features in zip(rows, together, strict=True):
        assert features.input_ids.tolist() == row.input_ids
        assert features.taps.shape == (len(row.input_ids), 2, 32) and features.last.shape == (len(row.input_ids), 32)
        assert_same(features, capture_batch(target, [row], TAPS)[0], exact=False)


def test_a_row_is_the_same_alone_behind_and_before_a_longer_one_and_alone_again(target) -> None:
    short, long = conversations([9, 40])
    alone = capture_batch(target, [short], TAPS)[0]
    assert_same(capture_batch(target, [long, short], TAPS)[1], alone, exact=False)
    assert_same(capture_batch(target, [short, long], TAPS)[0], alone, exact=False)
    assert_same(capture_batch(target, [short], TAPS)[0], alone)


def test_rows_that_share_a_prefix_are_captured_in_full(target) -> None:
    first, second = conversations([80, 90])
    second = dataclasses.replace(second, input_ids=first.input_ids[:64] + second.input_ids[64:])
    for rows in ([first, second], [first]):
        for row, features in zip(rows, capture_batch(target, rows, TAPS), strict=True):
            assert len(features.taps) == len(features.last) == len(row.input_ids)


def test_capture_writes_every_row_into_shards_of_the_asked_size(target, run) -> None:
    rows = conversations([7, 20, 3, 11, 30, 5, 9, 16, 4], held_out=3)
    capture(config_of(batch_tokens=40, shard_tokens=24), run, target, rows)
    manifest = ShardReader(run.features, "train").manifest
    assert manifest["taps"] == TAPS and manifest["layer_ids"].endswith("pre-norm")
    by_split = {
        split: [[row["tokens"] for row in shard["rows"]] for shard in manifest["shards"] if shard["split"] == split]
        for split in ("train", "heldout")
    }
    assert by_split == {"train": [[30], [16], [11, 9], [5, 4]], "heldout": [[20], [7, 3]]}
    found = everything(run, "train", "heldout")
    assert len(found) == 9
    for row in rows:
        assert_same(found[row.prompt_id], capture_batch(target, [row], TAPS)[0], exact=False)
    digests = {entry["prompt_id"]: entry["digest"] for shard in manifest["shards"] for entry in shard["rows"]}
    assert digests == {row.prompt_id: ids_digest(row.input_ids) for row in rows}


def test_capture_goes_on_where_it_stopped_and_computes_only_what_is_missing(target, run, tmp_path, monkeypatch) -> None:
    rows = conversations([7, 20, 3, 11, 30, 5, 9, 16, 4], held_out=2)
    config = config_of(batch_tokens=40, shard_tokens=24)
    whole = RunDir(tmp_path / "whole").create()
    capture(config, whole, target, rows)
    done: list[str] = []

    def counted(target: Any, part: Sequence[Conversation], taps: Sequence[int]) -> list[Features]:
        if len(done) >= 4:
            raise KeyboardInterrupt
        found = capture_batch(target, part, taps)
        done.extend(row.prompt_id for row in part)
        return found

    monkeypatch.setattr(stage, "capture_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        capture(config, run, target, rows)
    kept = set(everything(run))
    assert 0 < len(kept) < 7
    monkeypatch.setattr(stage, "capture_batch", lambda *args: done.extend(r.prompt_id for r in args[1]) or capture_batch(*args))
    done.clear()
    capture(config, run, target, rows)
    assert set(done) == {row.prompt_id for row in rows} - kept and len(done) == len(set(done))
    assert files(run) == files(whole)
    first, second = everything(whole, "train", "heldout"), everything(run, "train", "heldout")
    assert list(first) == list(second)
    for name in first:
        assert_same(first[name], second[name])
    done.clear()
    capture(config, run, target, rows)
    assert not done  # all is there: no pass at all


def planted(monkeypatch: pytest.MonkeyPatch, faults: dict[str, str]) -> None:
    def broken(target: Any, part: Sequence[Conversation], taps: Sequence[int]) -> list[Features]:
        found = []
        for features in capture_batch(target, part, taps):
            fault = faults.get(features.prompt_id)
            taps_, last = features.taps.clone(), features.last.clone()
            if fault == "zero":
                taps_[2, 1] = 0
            elif fault == "nan":
                last[1, 5] = float("nan")
            elif fault == "inf":
                taps_[0, 0, 0] = float("inf")
            found.append(dataclasses.replace(features, taps=taps_, last=last))
        return found

    monkeypatch.setattr(stage, "capture_batch", broken)


def test_broken_rows_up_to_one_percent_are_left_out_and_counted(target, run, monkeypatch, capsys) -> None:
    rows = conversations([6] * 200)
    planted(monkeypatch, {"p17": "zero", "p120": "nan"})
    capture(config_of(), run, target, rows)
    assert set(everything(run)) == {row.prompt_id for row in rows} - {"p17", "p120"}
    said = capsys.readouterr().err
    assert "left out" in said and "'taps all zero at a token': 1" in said and "'last not finite': 1" in said
    capture(config_of(), run, target, rows)  # going on does not make two broken rows of 200 a failure
    assert len(everything(run)) == 198


def test_more_broken_rows_than_one_percent_are_refused_with_their_number(target, run, monkeypatch) -> None:
    rows = conversations([6] * 200)
    planted(monkeypatch, {f"p{number}": ("nan", "inf")[number % 2] for number in range(0, 200, 19)})
    with pytest.raises(ValueError, match=r"capture: 11 of 200 conversations have broken states .*6 x last not finite"):
        capture(config_of(), run, target, rows)
    assert not any(name.endswith(".safetensors") for name in files(run))


def test_a_disk_too_small_is_refused_before_anything_is_computed(target, run, monkeypatch) -> None:
    rows = conversations([30] * 4)
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    monkeypatch.setattr(stage, "capture_batch", lambda *args: pytest.fail("computed"))
    with pytest.raises(ValueError, match=r"needs 0\.\d*[1-9] MB, 0\.001 MB are free; free space or set run\.root"):
        capture(config_of(), run, target, rows)
    assert files(run) == set()


def test_a_disk_that_fills_up_while_writing_is_one_line_and_leaves_no_part(target, run, monkeypatch) -> None:
    real, calls = shards.save_file, []

    def full(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half a shard")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **more)

    monkeypatch.setattr(shards, "save_file", full)
    rows = conversations([20, 20, 20])
    with pytest.raises(ValueError, match=r"shard could not be written \(No space left on device\); free space or set run\.root"):
        capture(config_of(shard_tokens=20), run, target, rows)
    assert files(run) == {"train-00000.safetensors", "manifest.json"}
    assert set(everything(run)) == {"p0"}
    capture(config_of(shard_tokens=20), run, target, rows)
    assert set(everything(run)) == {"p0", "p1", "p2"}


def test_the_size_estimate_is_within_five_percent_of_the_bytes_written(target, run) -> None:
    rows = conversations([60] * 20)
    capture(config_of(), run, target, rows)
    written = sum(path.stat().st_size for path in run.features.glob("*.safetensors"))
    assert feature_bytes(1_200, len(TAPS), 32, 4) == pytest.approx(written, rel=0.05)
    assert feature_bytes(1_000_000, 5, 64, 2) == 773_000_000  # five taps and the last layer


def test_features_of_another_target_taps_or_dtype_are_not_mixed(target, run, tiny_target) -> None:
    rows = conversations([10, 12])
    capture(config_of(), run, target, rows[:1])
    with pytest.raises(ValueError, match=r"another `taps`; use another run\.name"):
        capture(config_of(taps=[1, 2]), run, target, rows)
    with pytest.raises(ValueError, match="another `target`"):
        capture(config_of(), run, tiny_target(layers=3, seed=9), rows)
    assert set(everything(run)) == {"p0"}


def test_features_of_answers_that_were_made_anew_are_refused_by_capture_and_reader(target, run) -> None:
    rows = conversations([10, 12], held_out=1)
    capture(config_of(), run, target, rows)
    other = dataclasses.replace(rows[1], input_ids=[*rows[1].input_ids[:-1], 3])
    assert other.input_ids != rows[1].input_ids
    with pytest.raises(ValueError, match=r"features of p1 are of another answer than regen's; delete .*features and run capture"):
        capture(config_of(), run, target, [rows[0], other])
    keep = {other.prompt_id: ids_digest(other.input_ids)}
    with pytest.raises(ValueError, match="features of p1 are of another answer"):
        ShardReader(run.features, "train", keep=keep)


def test_the_header_names_what_features_depend_on(target) -> None:
    header = feature_header(config_of(), target)
    assert header["taps"] == TAPS and (header["hidden_size"], header["vocab_size"]) == (32, 64)
    assert {"id", "weights", "tokenizer", "chat_template", "dtype"} <= set(header["target"])
    assert (header["dtype"], header["quantisation"], header["max_length"]) == ("float32", "none", 256)
    assert feature_header(config_of(dtype="fp8", max_length=64), target) | {"dtype": "float32", "max_length": 256} == header
    assert header["target"]["dtype"] == "float32"


def test_half_precision_states_are_stored_as_they_are(tiny_target, run) -> None:
    target = tiny_target(layers=3, dtype=torch.bfloat16)
    rows = conversations([12, 7])
    capture(config_of(), run, target, rows)
    found = everything(run)
    for features in capture_batch(target, rows, TAPS):
        assert found[features.prompt_id].taps.dtype == torch.bfloat16
        assert_same(found[features.prompt_id], features)
