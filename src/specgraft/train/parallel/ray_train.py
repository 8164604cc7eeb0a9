"""Ranks as the workers of Ray Train: it places them, makes their process group, and ends all when one dies."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from specgraft.config import RunConfig
from specgraft.log import console, say
from specgraft.stream import cluster
from specgraft.train.parallel.group import Refused, backend
from specgraft.train.parallel.stop import FILE

Result = TypeVar("Result")
START = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"  # Ray Train's own, of the environment


def on_workers(config: RunConfig, root: Path, workers: int, work: Callable[[], Result]) -> Result:
    """`work` on that many workers, which have met in a process group; what it returns on the first. `root`: folder of the run.

    A worker takes a GPU where the cluster has some, unless `run.device` is "cpu". All must see this folder and that of the run
    under the same names. SIGTERM asks them to stop behind their step.
    Raises ValueError, in one line, for what a rank refuses, and where one dies; Stopped where they were asked to stop.
    """
    trainer, train = modules()
    os.environ.setdefault(START, str(config.train.timeout))
    owns = cluster.connect(config.stream, float(workers), config.run.device != "cpu")
    ray, scratch = cluster.ray(), root.resolve() / ".ray-train"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        say(f"train: {workers} {'worker' if workers == 1 else 'workers'} of Ray Train start")
        gpus = config.run.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= workers
        variables = {FILE: str(scratch / "stop"), **({"GLOO_SOCKET_IFNAME": "lo"} if owns else {})}
        fit = trainer.TorchTrainer(
            partial(told, os.getcwd(), scratch / "said", work),
            torch_config=trainer.TorchConfig(backend(gpus), timeout_s=round(config.train.timeout)),
            scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=gpus, resources_per_worker={"CPU": 1, **({"GPU": 1} if gpus else {})}),
            run_config=train.RunConfig(
                name="train", storage_path=str(scratch), worker_runtime_env={"env_vars": variables},
                failure_config=train.FailureConfig(controller_failure_limit=0),  # else workers that find no room are waited for without end
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )  # fmt: skip
        with noted(scratch / "stop"), heard(scratch / "said"):
            kind, found, code = fit.fit().return_value
    except train.TrainingFailedError as error:
        raise ValueError(f"train: {why(error)}; the same command goes on from the newest checkpoint") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if owns:
            ray.shutdown()
    if kind == "exit":
        raise SystemExit(code)
    if kind == "refused":
        raise Refused(found, code)
    return found


def modules() -> tuple[Any, Any]:
    """`ray.train.torch` and `ray.train`. Raises ValueError, in one line, where they are not installed."""
    os.environ[cluster.ON_LOOPBACK] = os.environ.get(cluster.ON_LOOPBACK, "0")
    cluster.ray()
    try:
        import ray.train
        import ray.train.torch
    except ImportError:
        raise ValueError('--ray-workers needs Ray Train: pip install "specgraft[ray-train]", or start the ranks with torchrun') from None
    return ray.train.torch, ray.train


def told(folder: str, said: Path, work: Callable[[], Any]) -> tuple[str, Any, int]:
    """On a worker: what `work` gives, or what ended it, so that a line and its exit code travel as they are."""
    os.chdir(folder)
    with said.open("a", encoding="utf-8") as handle:
        console.file = handle
        try:
            return "done", work(), 0
        except Refused as error:  # all of them do
            return "refused", str(error), error.exit_code
        except SystemExit as error:
            return "exit", None, int(error.code or 0)
        finally:
            console.file = None  # type: ignore[assignment]  # stderr, whatever that is then


def why(error: Any) -> str:
    """In one line, of Ray Train's report: the first worker's error that is no consequence of another's."""
    failures = getattr(error, "worker_failures", None)
    if not failures:  # no worker has begun
        return cluster.one_line(getattr(error, "controller_failure", error)).partition(" Potential causes")[0].rstrip(".")
    lines = {rank: cluster.one_line(failure) for rank, failure in sorted(failures.items())}
    rank = next((rank for rank, line in lines.items() if "has lost the others" not in line), min(lines))
    return f"rank {rank}: {lines[rank]}"


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """While it is entered, SIGTERM makes this file, which the workers look for (`stop`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: path.touch())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def heard(path: Path) -> Iterator[None]:
    """While it is entered, lines that come to this file are said here: what the ranks say, and nothing of Ray's own."""
    path.touch()
    over = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8", errors="replace") as handle:
            while not over.wait(0.5):
                console.print(handle.read(), markup=False, end="")
            console.print(handle.read(), markup=False, end="")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
