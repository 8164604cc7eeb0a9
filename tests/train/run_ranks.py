"""Runs of `train` on several gloo ranks, many in one set of processes: starting those is what costs."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from specgraft.capture.stage import feature_header
from specgraft.run_dir import RunDir, write_text
from specgraft.train import stage
from specgraft.train.checkpoint import checkpoints
from specgraft.train.parallel import sharded
from specgraft.train.parallel.group import Group
from specgraft.train.stage import train

Case = tuple[str, dict[str, Any]]  # name of the run (`name<other`: goes on from the first checkpoint of that one), changes to its config


def module_at(name: str, path: Path) -> ModuleType:
    """A file as a module: there are two of the name conftest."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_case(root: Path, changes: dict[str, Any], group: Group | None) -> None:
    """Trains in the run folder `root`, as `Ready.train` does."""
    here = Path(__file__).parent
    own, shared = module_at("train_parts", here / "conftest.py"), module_at("tiny_parts", here.parent / "conftest.py")
    ready = own.Ready(RunDir(root), lambda: shared.make_target(markov=3.0))
    config, target = ready.config(**changes), ready.new_target()
    scorer = None
    if config.distill.origin == "branches":
        from branches_by_hand import AloneScorer

        scorer = AloneScorer(target)
    train(config, ready.run, target, feature_header(config, target), own.answers(), scorer, group=group)


def work(rank: int, size: int, folder: str, cases: list[Case]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    group = Group(rank, size)
    for case, changes in cases:
        name, _, other = case.partition("<")
        if other and rank == 0:
            shutil.copytree(Path(folder) / other, Path(folder) / name)
            for later in checkpoints(Path(folder) / name / "checkpoints")[1:]:
                shutil.rmtree(later)
        distributed.barrier()
        try:
            with disturbed(name, rank):
                train_case(Path(folder) / name, changes, group)
        except ValueError as error:
            write_text(Path(folder) / f"{name}.{rank}.refused", f"{getattr(error, 'exit_code', 2)} {error}")
        except SystemExit as error:
            write_text(Path(folder) / f"{name}.{rank}.exit", str(error.code))
    distributed.destroy_process_group()


@contextmanager
def disturbed(name: str, rank: int) -> Iterator[None]:
    """What befalls one rank, or all of them, in the runs of these names."""
    who, what = DISTURBED.get(name, (None, None))
    with pytest.MonkeyPatch.context() as patch:
        if what is not None and who in (rank, None):
            what(patch)
        yield


def sigterm(patch: pytest.MonkeyPatch) -> None:
    """In the third step."""
    steps, learn = [], stage.gradients

    def asked(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*args)

    patch.setattr(stage, "gradients", asked)


def damaged_row(patch: pytest.MonkeyPatch) -> None:
    """In the second step."""
    shares = stage.step_shares

    def damaged(*args: Any) -> Any:
        yield next(shares(*args))
        error = ValueError("shard 3 is damaged")
        error.exit_code = 7  # type: ignore[attr-defined]
        raise error

    patch.setattr(stage, "step_shares", damaged)


class Writer(HuggingFaceStorageWriter):
    """Of parts of a checkpoint; what is done to the second one is in `write_data` or `finish`."""

    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).made += 1


class Full(Writer):
    def write_data(self, *args: Any) -> Any:
        if self.made == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(*args)


class Unseen(Writer):
    def finish(self, **given: Any) -> Any:
        """The part of the first rank, and not of the last: the whole tensors keep their shape."""
        if self.made == 2:
            for part in Path(self.path).glob("shard-00001-*"):
                part.unlink()
        return super().finish(**given)


class Killed(Writer):
    def write_data(self, *args: Any) -> Any:
        if self.made == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(*args)


def writes_with(kind: type[Writer]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(sharded, "HuggingFaceStorageWriter", kind)


DISTURBED: dict[str, tuple[int | None, Callable[[pytest.MonkeyPatch], None]]] = {
    "sigterm": (1, sigterm), "refused": (1, damaged_row), "full": (1, writes_with(Full)), "unseen": (0, writes_with(Unseen)),
    "killed": (1, writes_with(Killed)),
}  # fmt: skip


def run_ranks(size: int, captured: Path, folder: Path, cases: list[Case]) -> None:
    """Every case trained by `size` ranks, in folder/name."""
    for name, _ in cases:
        if "<" not in name:
            shutil.copytree(captured, folder / name)
    multiprocessing.spawn(work, (size, str(folder), cases), nprocs=size)
