"""Features of every conversation, whatever batch and shard it meets in; broken rows, interruptions and full disks."""

from __future__ import annotations

import dataclasses
import errno
import json
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
from specgraft.plan.storage import of_run, storage
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run_dir import RunDir, read_json, write_json
from specgraft.stream import fp8, shards
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
    assert feature_bytes(1_000_000, 5, 64, 1) == 413_000_000  # fp8: and six scales
    assert feature_bytes(1_000_000, 5, 64, 2, streams=4) == 1_157_000_000  # the last layer's four residual streams


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


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_plan_storage_predicts_what_capture_writes_headers_included(tiny_target, run, dtype) -> None:
    """Also where headers are a fifth of the bytes."""
    target = tiny_target(layers=3, dtype=torch.bfloat16)
    rows = conversations([5 + 37 * number % 60 for number in range(60)], held_out=10)
    config = RunConfig.model_validate({"target": {"id": "tiny"}, "capture": {"taps": TAPS, "dtype": dtype, "shard_tokens": 512}})
    capture(config, run, target, rows)
    written = sum(path.stat().st_size for path in run.features.iterdir())
    tokens = sum(len(row.input_ids) for row in rows)
    need = storage(tokens, len(TAPS), 32, "fp8" if dtype == "fp8" else "bfloat16", len(rows), 512)
    assert need.bytes == pytest.approx(written, rel=0.05)
    assert need.bytes_per_token == feature_bytes(1, len(TAPS), 32, 1 if dtype == "fp8" else 2)
    run.regen.mkdir()
    (run.regen / "train-00000.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    write_json(run.config, config.model_dump(mode="json"))
    assert of_run(run.root, hidden=32) == need
    with pytest.raises(ValueError, match=r"target\.id='tiny' is no folder here: give --hidden"):
        of_run(run.root)


def test_fp8_features_are_the_codes_of_the_targets_own_and_half_their_bytes(tiny_target, tmp_path, capsys) -> None:
    target = tiny_target(layers=3, hidden=64, dtype=torch.bfloat16)
    rows = conversations([40, 33, 25, 12] * 8, held_out=2)
    whole, small = RunDir(tmp_path / "whole").create(), RunDir(tmp_path / "small").create()
    capture(config_of(), whole, target, rows)
    capture(config_of(dtype="fp8"), small, target, rows)
    left, right = everything(whole, "train", "heldout"), everything(small, "train", "heldout")
    assert left.keys() == right.keys()
    for name, features in left.items():
        assert right[name].taps.dtype == right[name].last.dtype == torch.bfloat16
        assert torch.equal(right[name].taps, fp8.decode(*fp8.encode(features.taps), torch.bfloat16))
        assert torch.equal(right[name].last, fp8.decode(*fp8.encode(features.last), torch.bfloat16))
    sizes = [sum(path.stat().st_size for path in run.features.glob("*.safetensors")) for run in (small, whole)]
    assert sizes[0] / sizes[1] == pytest.approx((3 * 64 + 3 * 4 + 5) / (3 * 64 * 2 + 5), rel=0.03)
    with pytest.raises(ValueError, match="another `dtype`"):
        capture(config_of(dtype="fp8"), whole, target, rows)


def test_r9_a_limit_that_leaves_nothing_to_learn(target, tmp_path, capsys) -> None:
    """max_length 64; a prompt of 64 ids and an answer of 20, a prompt of 63 and an answer of 20; then only such rows."""
    rows = [dataclasses.replace(row, loss_mask=[False] * prompt + [True] * 20, prompt_length=prompt)
            for row, prompt in zip(conversations([84, 83, 82, 30]), (64, 63, 62, 10), strict=True)]  # fmt: skip
    run = RunDir(tmp_path / "some").create()
    capture(config_of(max_length=64), run, target, rows)
    found = everything(run)
    assert {name: len(features.input_ids) for name, features in found.items()} == {"p2": 64, "p3": 30}
    assert_same(found["p2"], capture_batch(target, [dataclasses.replace(rows[2], input_ids=rows[2].input_ids[:64], loss_mask=rows[2].loss_mask[:64])], TAPS)[0], exact=False)
    said = capsys.readouterr().err
    assert "1 cut at 64 tokens" in said and "left out {'no supervised token': 1, 'no legal anchor': 1} of 4" in said
    assert read_json(run.features / "manifest.json")["notes"] == {"left_out": {"p0": "no supervised token", "p1": "no legal anchor"}, "cut": 1}
    capture(config_of(max_length=64), run, target, rows)  # all there is to capture is there
    with pytest.raises(ValueError, match=r"nothing can be learnt from any of the 2 train conversations \(1 x no supervised token, 1 x no legal anchor, at most 64"):
        capture(config_of(max_length=64), RunDir(tmp_path / "none").create(), target, rows[:2])
    held_out = [dataclasses.replace(row, split="heldout") for row in rows[:2]]
    with pytest.raises(ValueError, match="any of the 2 heldout conversations"):
        capture(config_of(max_length=64), RunDir(tmp_path / "none").create(), target, [*rows[2:], *held_out])


def test_r12_features_cut_at_another_length_are_other_features(target, run, tmp_path) -> None:
    rows = conversations([50, 20])
    capture(config_of(max_length=32), run, target, rows)
    with pytest.raises(ValueError, match=r"another `max_length`; use another run\.name"):
        capture(config_of(max_length=64), run, target, rows)
    with pytest.raises(ValueError, match="made with max_length=32, this run has 256"):
        ShardReader(run.features, "train", feature_header(config_of(), target))
    other = RunDir(tmp_path / "other").create()
    capture(config_of(max_length=300), other, target, rows)  # longer than the target's context of 256
    ShardReader(other.features, "train", feature_header(config_of(), target))
    assert {len(features.input_ids) for features in everything(other).values()} == {50, 20}


def test_what_a_drafter_is_trained_on_does_not_hang_on_the_shards(target, tmp_path) -> None:
    rows = conversations([7, 20, 3, 11, 30, 5, 9, 16, 4])
    keep = {row.prompt_id: ids_digest(row.input_ids) for row in rows}
    readers = []
    for number, sizes in enumerate(((40, 24), (4096, 65536))):
        run = RunDir(tmp_path / str(number)).create()
        capture(config_of(batch_tokens=sizes[0], shard_tokens=sizes[1]), run, target, rows)
        readers.append(ShardReader(run.features, "train", keep=keep))
    assert readers[0].index != readers[1].index and readers[0].digest() == readers[1].digest()
    for index, row in enumerate(rows):
        assert readers[0][index].prompt_id == readers[1][index].prompt_id == row.prompt_id
        assert_same(readers[0][index], readers[1][index], exact=False)


def test_the_log_says_how_much_was_padding(target, run, capsys) -> None:
    capture(config_of(batch_tokens=64), run, target, conversations([30, 30, 29, 8]))
    # batches [30, 30], [29], [8]: none with more than 5 % of padding
    assert "capture: 4 rows, 97 tokens, padding 0.0%; 0 cut at 256 tokens" in capsys.readouterr().err
