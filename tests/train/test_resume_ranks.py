"""10 + 10 steps against 20 on 1, 2 and 4 ranks, whole (ddp) or sharded (fsdp); checkpoints that ranks write together (faults.md S1, T5).

Same ranks: the same bits. Others: sums in another order, so losses, gradient norms and weights within 1e-6 relative."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import Case, run_ranks, train_case
from safetensors.torch import load_file
from torch.multiprocessing.spawn import ProcessException

from specgraft.drafters.store import load_drafter
from specgraft.log import read_metrics
from specgraft.train.checkpoint import checkpoints, verify
from specgraft.train.told import MEASURED

FILES = ("drafter.safetensors", "optimizer.safetensors")
WAYS = ("ddp", "fsdp")


def changes(parallel: str, steps: int = 20, accumulate: int = 1) -> dict[str, Any]:
    every = steps // 2
    train = {"rows": 7, "steps": steps, "checkpoint_every": every, "validate_every": every, "keep": 9, "parallel": parallel, "accumulate": accumulate}
    return {"train": train}


@pytest.fixture(scope="module")
def one(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one process has made 20 steps, in `one`."""
    folder = tmp_path_factory.mktemp("resumed")
    train_case(Path(shutil.copytree(captured, folder / "one")), changes("ddp"), None)
    return folder


@pytest.fixture(scope="module")
def two(captured: Path, one: Path) -> Path:
    """The same folder, with what two ranks make in it. The last one of them is killed."""
    cases: list[Case] = []
    for way in WAYS:
        cases += [(f"{way}-2", changes(way)), (f"{way}-2-2<{way}-2", changes(way)), (f"{way}-1-2<one", changes(way))]
    cases += [(name, changes("fsdp", 4)) for name in ("full", "unseen", "killed")]
    with pytest.raises(ProcessException):
        run_ranks(2, captured, one, cases)
    return one


@pytest.fixture(scope="module")
def four(captured: Path, two: Path) -> Path:
    cases: list[Case] = [("after<killed", changes("fsdp", 4))]
    for way in WAYS:
        cases += [(f"{way}-4", changes(way)), (f"{way}-2-4<{way}-2", changes(way))]
    run_ranks(4, captured, two, cases)
    return two


@pytest.fixture
def in_one_process(tmp_path: Path) -> Callable[[Path], Path]:
    """Goes on from the first checkpoint of a run, without ranks."""

    def go(root: Path, steps: int = 20) -> Path:
        copied = Path(shutil.copytree(root, tmp_path / "copied"))
        for later in checkpoints(copied / "checkpoints")[1:]:
            shutil.rmtree(later)
        train_case(copied, changes("ddp", steps), None)
        return copied

    return go


def rows(root: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in MEASURED and not key.endswith("seconds")}
        for row in read_metrics(root / "metrics.jsonl")
    ]


def same_bits(root: Path, other: Path) -> None:
    for name in FILES:
        left, right = (load_file(checkpoints(each / "checkpoints")[-1] / name) for each in (root, other))
        assert left.keys() == right.keys() and left and all(torch.equal(left[key], right[key]) for key in left), name
    assert rows(root) == rows(other)


def nearly(root: Path, other: Path) -> None:
    """Every row within 1e-6; prints how far losses, norms and weights are apart."""
    mine, others = rows(root), rows(other)
    assert [(row["kind"], row["step"]) for row in mine] == [(row["kind"], row["step"]) for row in others] and len(mine) >= 20
    worst = {
        name: max(abs(row[name] - twin[name]) / abs(twin[name]) for row, twin in zip(mine, others, strict=True) if name in twin)
        for name in ("loss", "grad_norm")
    }
    left, right = (load_file(checkpoints(each / "checkpoints")[-1] / FILES[0]) for each in (root, other))
    worst["weights"] = max(float((left[key] - right[key]).norm() / right[key].norm()) for key in right)
    print(f"{root.name} against {other.name}: " + ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
    assert max(worst.values()) < 1e-6
    for row, twin in zip(mine, others, strict=True):
        for key, value in twin.items():
            assert row[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6, abs=1e-7)), (row["step"], key)


def test_one_process_goes_on_to_the_same_bits(one: Path, in_one_process) -> None:
    same_bits(in_one_process(one / "one"), one / "one")


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_go_on_to_the_same_bits(two: Path, way: str) -> None:
    same_bits(two / f"{way}-2-2", two / f"{way}-2")


@pytest.mark.parametrize("way", WAYS)
def test_one_then_two(two: Path, way: str) -> None:
    nearly(two / f"{way}-1-2", two / "one")


@pytest.mark.parametrize("way", WAYS)
def test_two_then_four(four: Path, way: str) -> None:
    nearly(four / f"{way}-2-4", four / f"{way}-2")
    nearly(four / f"{way}-2-4", four / "one")


@pytest.mark.parametrize("way", WAYS)
def test_four_then_one(four: Path, in_one_process, way: str) -> None:
    nearly(in_one_process(four / f"{way}-4"), four / f"{way}-4")


# checkpoints that ranks write together


def told(folder: Path, name: str) -> str:
    """What both ranks refuse, in one line."""
    both = [(folder / f"{name}.{rank}.refused").read_text() for rank in (0, 1)]
    assert both[0] == both[1] and "\n" not in both[0]
    return both[0]


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


def test_sharded_checkpoints_are_laid_out_as_whole_ones(two: Path) -> None:
    """The same files, names and headers of tensors; each is read alone, without torch.distributed, and nothing is pickled."""
    sharded, whole = (checkpoints(two / name / "checkpoints")[0] for name in ("fsdp-2", "one"))
    assert sorted(path.name for path in sharded.iterdir()) == sorted(path.name for path in whole.iterdir()) == ["config.json", *FILES, "state.json"]
    for name in FILES:
        left, right = load_file(sharded / name), load_file(whole / name)
        assert {key: (value.shape, value.dtype) for key, value in left.items()} == {key: (value.shape, value.dtype) for key, value in right.items()}
    assert set(json.loads((verify(sharded) / "state.json").read_text())["sha256"]) == set(FILES)
    assert load_drafter(sharded).config == load_drafter(whole).config


def test_one_flipped_byte_of_what_ranks_wrote_is_refused(two: Path) -> None:
    for name in FILES:
        copied = Path(shutil.copytree(two / "fsdp-2" / "checkpoints", two / "flipped", dirs_exist_ok=True))
        path = copied / "step-000020" / name
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(ValueError, match=f"{name} is not what was saved"):
            verify(path.parent)


def test_a_full_disk_of_one_rank_is_refused_by_all_and_leaves_the_older_checkpoint(two: Path) -> None:
    """Rank 1 writes no second checkpoint."""
    assert "step-000004: could not be written (No space left on device); free space" in told(two, "full")
    assert kept(two / "full") == ["step-000002"]


def test_a_part_that_is_not_seen_is_refused_by_all(two: Path) -> None:
    """Rank 0 puts a second checkpoint together without its own part; torch makes zeros of it."""
    assert "step-000004: could not be written (what was read again is not what ranks hold)" in told(two, "unseen")
    assert kept(two / "unseen") == ["step-000002"]


def test_a_rank_killed_while_it_writes_leaves_no_half_checkpoint(four: Path, in_one_process) -> None:
    """Rank 1 of two, in the second checkpoint; four ranks clear what is left and go on to what one process goes on to."""
    assert [path.name for path in checkpoints(four / "killed" / "checkpoints")] == ["step-000002"]
    assert kept(four / "killed") == [".step-000004.tmp", "step-000002"]
    assert kept(four / "after") == ["step-000002", "step-000004"]
    losses = [[row["loss"] for row in rows(root) if row["kind"] == "train"] for root in (four / "after", in_one_process(four / "killed", 4))]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-6)
