"""Media that make rows while they are asked for: the order asked for, nothing doubled, bounded, bad rows by config; and what is kept."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from media import HEADER, Maker, config_of, conversations, digests, features, fine

from specgraft.run_dir import RunDir
from specgraft.stream import fp8
from specgraft.stream.kept import KeptSource
from specgraft.stream.live import Counts, LiveSource, in_a_thread
from specgraft.stream.open import open_source
from specgraft.stream.shards import ShardReader, ShardWriter

ORDER = [3, 0, 4, 4, 1, 5, 2, 0, 3]


def live(maker: Maker, rows: Any, coded: bool = False, bound: float = 1e9, header: Any = HEADER, **more: Any) -> LiveSource:
    counts = Counts()
    return LiveSource(rows, digests(rows), header, in_a_thread(maker, coded, fine, bound, counts), counts, **more)


def kept(maker: Maker, rows: Any, folder: Path, shard_tokens: int = 40, **more: Any) -> KeptSource:
    return KeptSource(live(maker, rows, **more), folder, "train", more.get("header", HEADER), shard_tokens)


def assert_rows(found: Any, rows: Any, order: Any) -> None:
    found = list(found)
    assert len(found) == len(order)
    for one, index in zip(found, order, strict=True):
        want = features(rows[index])
        assert one.prompt_id == want.prompt_id
        for name in ("input_ids", "loss_mask", "taps", "last"):
            assert torch.equal(getattr(one, name), getattr(want, name))


def test_rows_come_in_the_order_asked_for_and_say_what_disk_says(tmp_path: Path) -> None:
    rows = conversations(6)
    source = live(Maker(), rows)
    assert_rows(source.rows(iter(ORDER)), rows, ORDER)
    writer = ShardWriter(tmp_path / "features", HEADER)
    writer.add("train", [features(rows[n]) for n in (4, 1, 0, 2, 5, 3)], [digests(rows)[f"p{n}"] for n in (4, 1, 0, 2, 5, 3)])
    disk = ShardReader(tmp_path / "features", "train", HEADER, digests(rows))
    assert_rows(disk.rows(ORDER), rows, ORDER)
    assert source.ids == disk.ids and source.lengths == disk.lengths and source.digest() == disk.digest()
    assert source.digest() != live(Maker(), rows[:5]).digest()


def test_rows_of_a_group_share_a_pass_and_the_last_may_be_smaller() -> None:
    maker = Maker()
    rows = conversations(7)
    assert_rows(live(maker, rows, group=3).rows(range(7)), rows, range(7))
    assert maker.batches == [3, 3, 1]


def test_fp8_states_are_those_that_a_shard_would_give() -> None:
    rows = conversations(3)
    header = {**HEADER, "dtype": "fp8"}
    for row, found in zip(rows, live(Maker(), rows, coded=True, header=header).rows(range(3)), strict=True):
        assert found is not None
        assert torch.equal(found.taps, fp8.decode(*fp8.encode(features(row).taps), torch.float32))


def test_s5_at_most_the_bound_is_made_ahead_of_a_slow_trainer() -> None:
    rows = conversations(40)
    maker = Maker()
    size = 12 * 3 * 8 * 4  # of the smallest row
    source = live(maker, rows, bound=8 * size)
    found = source.rows(range(40))
    for taken in range(1, 12):
        next(found)
        time.sleep(0.02)
        assert len(maker.made) <= taken + 8 + 1  # one is on its way
    facts = source.facts()
    assert 0 < facts["queue_bytes"] <= 8 * size and facts["queue_peak_bytes"] <= 8 * size and facts["queue_rows"] <= 8
    found.close()
    made = len(maker.made)
    time.sleep(0.05)
    assert len(maker.made) == made and made < 25
    assert not [thread for thread in threading.enumerate() if "_produce" in thread.name]


def test_an_error_of_the_producer_comes_behind_the_rows_before_it() -> None:
    rows = conversations(6)
    found = live(Maker(error_at=2), rows).rows(range(6))
    assert [next(found).prompt_id, next(found).prompt_id] == ["p0", "p1"]
    with pytest.raises(ValueError, match="the server is gone"):
        next(found)


def test_bad_rows_stop_the_run_naming_the_row_or_leave_a_hole_that_is_counted() -> None:
    rows = conversations(6)
    with pytest.raises(ValueError, match="p4: last not finite"):
        list(live(Maker(["p4"]), rows).rows(range(6)))
    source = live(Maker(["p4"]), rows, bad_rows="skip")
    assert [None if row is None else row.prompt_id for row in source.rows([5, 4, 3, 4])] == ["p5", None, "p3", None]
    assert source.facts()["skipped"] == 1
    with pytest.raises(ValueError, match=r"2 bad rows, 1 are admitted \(1 %\)"):
        list(live(Maker(["p4", "p1"]), rows, bad_rows="skip").rows(range(6)))


def test_a_split_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no row from which anything can be learnt"):
        live(Maker(), [])


# kept


def test_s6_what_was_made_is_kept_and_read_by_later_epochs_and_runs(tmp_path: Path) -> None:
    rows, folder = conversations(6), tmp_path / "run" / "features"
    folder.parent.mkdir()
    first, second, third = Maker(), Maker(), Maker()
    found = kept(first, rows, folder).rows([*range(6), *range(6)])
    assert_rows([next(found) for _ in range(3)], rows, range(3))
    found.close()  # stopped behind 3 of 6
    there = ShardWriter(folder, HEADER).digests
    assert {"p0", "p1", "p2"} <= set(there) <= set(first.made)
    assert_rows(kept(second, rows, folder).rows([*ORDER, *range(6)]), rows, [*ORDER, *range(6)])
    assert set(second.made) == set(digests(rows)) - set(there) and len(second.made) == len(set(second.made))
    assert_rows(kept(third, rows, folder).rows(range(6)), rows, range(6))
    assert third.made == []
    disk = ShardReader(folder, "train", HEADER, digests(rows))
    assert disk.lengths == [len(row.input_ids) for row in rows] and disk.digest() == kept(third, rows, folder).digest()
    assert_rows(disk.rows(ORDER), rows, ORDER)


@pytest.mark.parametrize("shard_tokens", [1, 30, 1000])
def test_a_row_that_comes_again_before_it_was_written_is_made_once(tmp_path: Path, shard_tokens: int) -> None:
    rows, maker = conversations(6), Maker()
    assert_rows(kept(maker, rows, tmp_path / "f", shard_tokens).rows(ORDER), rows, ORDER)
    assert sorted(maker.made) == sorted(digests(rows))


def test_kept_fp8_states_are_the_same_at_first_use_and_from_disk(tmp_path: Path) -> None:
    rows, header = conversations(4), {**HEADER, "dtype": "fp8"}
    source = kept(Maker(), rows, tmp_path / "f", coded=True, header=header)
    first, again = list(source.rows(range(4))), list(source.rows(range(4)))
    assert all(torch.equal(a.taps, b.taps) and torch.equal(a.last, b.last) for a, b in zip(first, again, strict=True))


def test_two_writers_of_one_folder_keep_every_row_once(tmp_path: Path) -> None:
    rows = conversations(30)
    makers = [Maker(), Maker()]
    sources = [kept(maker, rows, tmp_path / "f", 30) for maker in makers]
    halves = [range(0, 30, 2), range(1, 30, 2)]
    threads = [threading.Thread(target=lambda s=s, h=h: list(s.rows(h))) for s, h in zip(sources, halves, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ShardWriter(tmp_path / "f", HEADER).digests) == sorted(digests(rows))
    assert_rows(sources[0].rows(range(30)), rows, range(30))
    assert len(makers[0].made) == 15


def test_a_bad_row_is_not_kept_and_is_none_again(tmp_path: Path) -> None:
    rows = conversations(5)
    source = kept(Maker(["p2"]), rows, tmp_path / "f", 20, bad_rows="skip")
    assert [row is None for row in source.rows([0, 2, 1, 2, 3, 4, 2])] == [False, True, False, True, False, False, True]
    assert "p2" not in ShardWriter(tmp_path / "f", HEADER).digests and source.facts()["skipped"] == 1


def test_kept_features_of_other_answers_or_another_target_are_refused(tmp_path: Path) -> None:
    rows = conversations(4)
    list(kept(Maker(), rows, tmp_path / "f").rows(range(4)))
    with pytest.raises(ValueError, match="another `target`"):
        kept(Maker(), rows, tmp_path / "f", header={**HEADER, "target": {**HEADER["target"], "weights": "x"}})
    other = conversations(4, length=13)
    with pytest.raises(ValueError, match="of another answer than regen's"):
        kept(Maker(), other, tmp_path / "f")


def test_the_medium_is_the_configs(tmp_path: Path) -> None:
    rows, run = conversations(5, held_out=2), RunDir(tmp_path)
    keep = digests(rows[2:])
    make = in_a_thread(Maker(), False, fine, 1e9, Counts())
    for medium, kind in (("memory", LiveSource), ("hybrid", KeptSource), ("disk", ShardReader)):
        source = open_source(config_of(medium=medium), run, HEADER, rows, "train", keep, make)
        assert isinstance(source, kind)
        assert [row.prompt_id for row in source.rows([2, 0])] == ["p4", "p2"] or medium == "disk"
        if medium == "hybrid":
            list(source.rows(range(3)))
    assert_rows(source.rows(range(3)), rows[2:], range(3))  # disk reads what hybrid kept
