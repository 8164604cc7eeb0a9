"""Ray: a cluster that is joined or started, and the actor that holds whatever makes rows.

What is started here listens on loopback and has no dashboard. Object transport between Ray's processes is Ray's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from specgraft.config import StreamSection

NAMESPACE = "specgraft"
LEAST_STORE = 128 * 2**20  # bytes of shared memory


def ray() -> Any:
    """The module. Raises ValueError, in one line, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ValueError('stream.medium="ray" needs Ray: pip install "specgraft[ray]", or set another stream.medium') from None
    return ray


def connect(part: StreamSection) -> bool:
    """Joins the cluster at `stream.address`, or starts one of this machine; True: it was started, and ends with us."""
    if part.address:
        module = ray()
        if not module.is_initialized():
            try:
                module.init(address=part.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"stream.address={part.address!r}: no Ray cluster answers there ({reason}); start one with `ray start --head`") from None
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("stream.address is empty and several trainer ranks share the producers: start a cluster with `ray start --head` and name it")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own switch for a node address of 127.0.0.1; read at import
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let anything else on this machine starve the producers
    module = ray()
    if module.is_initialized():
        return False
    module.init(
        num_cpus=max(1, round(part.producers * part.cpus + 0.5)), num_gpus=None if part.gpus else 0, namespace=NAMESPACE, include_dashboard=False,
        object_store_memory=int(max(LEAST_STORE, 1.5e6 * part.bound_mb)), log_to_driver=False, logging_level="error",
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    return True


class Host:
    """The actor: loads once, then does what it is asked with what it holds."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.held = load()

    def ready(self) -> int:
        return os.getpid()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """`function(held, *arguments)`, and the seconds that it took."""
        began = time.monotonic()
        return function(self.held, *arguments), time.monotonic() - began


def one_line(error: BaseException) -> str:
    """Of Ray's reports, which hold a traceback, what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition("Worker exit detail:") for line in lines]
    if found := [f"{head.rpartition('orker exit type:')[2].strip()}: {tail.strip()}" for head, mark, tail in told if mark]:
        return found[0].partition(" Some common causes")[0]
    return lines[-1] if lines else type(error).__name__
