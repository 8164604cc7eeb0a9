"""A server as a child process: started, waited for until it is healthy, stopped with all its children."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

GRACE = 15.0  # seconds between asking it to stop and stopping it
# a killed run must not leave a server behind: the kernel tells it (Linux, util-linux)
TOLD = ["setpriv", "--pdeathsig", "TERM", "--"] if sys.platform == "linux" and shutil.which("setpriv") else []


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Process:
    """`with Process(command, port, log) as server: Pool([server.url])`.

    `log` takes all that it prints. `environment` comes on top of this process's own. `limit`: seconds until it must
    answer at `health`. Raises ValueError where it does not, with the exit code and the last line of the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
        limit: float = 300.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.command, self.log, self.health, self.limit = list(command), log, health, limit
        self.environment = {**os.environ, **(environment or {})}
        self.url = f"http://{host}:{port}"
        self.host, self.port = host, port
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it and returns when it is healthy."""
        with socket.socket() as probe:
            if probe.connect_ex((self.host, self.port)) == 0:
                raise ValueError(f"port {self.port} is in use by another server: choose another port")
        if not shutil.which(self.command[0]):
            raise ValueError(f"{self.command[0]}: no such program; run `make engines`")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            try:  # a group of its own: engines start workers, and those must not outlive it
                self.child = subprocess.Popen(
                    [*TOLD, *self.command], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
                )  # fmt: skip
            except OSError as error:
                raise ValueError(f"{self.command[0]}: cannot be started ({error.strerror}); run `make engines`") from None
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + self.limit
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < end:
                if (code := self.exit_code()) is not None:
                    raise ValueError(f"{self.command[0]} ended with code {code} before it was ready: {self.last_line()} (log: {self.log})")
                try:
                    if client.get(self.url + self.health).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        raise ValueError(f"{self.command[0]} was not ready within {self.limit:g} s: {self.last_line()} (log: {self.log})")

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.child.poll() if self.child is not None else None

    def last_line(self) -> str:
        """The last thing it said, one line."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")

    def stop(self) -> None:
        """Stops it and its children, at the latest after GRACE seconds. Does nothing where it does not run."""
        child, self.child = self.child, None
        if child is None:
            return
        _signal(child.pid, signal.SIGTERM)
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
        _signal(child.pid, signal.SIGKILL)  # whatever is left of the group
        child.wait()


def _signal(group: int, which: signal.Signals) -> None:
    try:
        os.killpg(group, which)
    except ProcessLookupError:
        pass
