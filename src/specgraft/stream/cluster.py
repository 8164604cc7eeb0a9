"""Ray: a cluster that is joined or started, and the actor that holds whatever makes rows.

What is started here listens on loopback and has no dashboard. Object transport between Ray's processes is Ray's own.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from specgraft.config import StreamSection

NAMESPACE = "specgraft"
LEAST_STORE = 128 * 2**20  # bytes of shared memory
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's own switch, read at import: "0" lets a node's address be 127.0.0.1
PATIENCE = 10.0  # seconds for somebody to answer at an address


def ray() -> Any:
    """The module. Raises ValueError, in one line, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread that asks late would start a cluster of its own
    try:
        import ray
    except ImportError:
        raise ValueError('stream.medium="ray" needs Ray: pip install "specgraft[ray]", or set another stream.medium') from None
    return ray


def connect(part: StreamSection, cpus: float = 0.0, gpus: bool = False) -> bool:
    """Joins the cluster at `stream.address`, or starts one of this machine; True: it was started, and ends with us.

    `cpus`, `gpus`: what else than producers it must have room for. Raises ValueError, in one line, without Ray or a cluster.
    """
    if hosted():
        return False
    shown = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "error"}
    if part.address:
        if not reached(part.address):
            raise ValueError(f"stream.address={part.address!r}: nothing answers there; start a cluster with `ray start --head`, or mend the address")
        module = ray()
        if not module.is_initialized():
            try:
                module.init(address=part.address, **shown)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"stream.address={part.address!r}: no Ray cluster answers there ({reason}); start one with `ray start --head`") from None
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("stream.address is empty and several trainer ranks share the producers: start a cluster with `ray start --head` and name it")
    os.environ[ON_LOOPBACK] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let anything else on this machine starve the producers
    module = ray()
    if module.is_initialized():
        return False
    producers = part.producers * part.cpus if part.medium == "ray" else 0.0
    module.init(
        address="local", num_cpus=max(1, round(producers + cpus + 0.5)), num_gpus=None if part.gpus or gpus else 0, include_dashboard=False,
        object_store_memory=int(max(LEAST_STORE, 1.5e6 * part.bound_mb)), _node_ip_address="127.0.0.1", **shown,
    )  # fmt: skip
    return True


def hosted() -> bool:
    """This process is one of Ray's: whoever started it has joined its cluster."""
    module = sys.modules.get("ray")
    return module is not None and module.is_initialized() and module.get_runtime_context().get_actor_id() is not None


def reached(address: str) -> bool:
    """Whether somebody listens at host:port: Ray itself would wait for minutes. Other forms of an address are Ray's to judge."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return True
    try:
        with socket.create_connection((host, int(port)), PATIENCE) as found:
            if ip_address(found.getpeername()[0]).is_loopback:
                os.environ[ON_LOOPBACK] = "0"
    except OSError:
        return False
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
