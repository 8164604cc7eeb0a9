"""A server as a child process: waited for, said what it died of, stopped with its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from specgraft.engines import process
from specgraft.engines.process import Process, free_port

SERVER = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *words): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_is_there_while_the_block_runs_and_its_children_go_with_it(tmp_path):
    port, log = free_port(), tmp_path / "logs" / "server.log"
    with Process([sys.executable, "-c", SERVER, str(port)], port, log, environment={"MORE": "1"}) as server:
        assert httpx.get(server.url + "/health").status_code == 200 and server.exit_code() is None
        child = int(log.read_text().split()[1])
        assert alive(child)
    end = time.monotonic() + 5
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url + "/health")
    server.stop()  # once more does nothing


def test_a_server_that_dies_says_what_it_died_of(tmp_path):
    command = [sys.executable, "-c", "print('loading'); raise SystemExit('no such model')"]
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"ended with code 1 before it was ready: no such model \(log: .*server.log\)"):
        Process(command, free_port(), tmp_path / "server.log").start()
    assert time.monotonic() - began < 30


def test_a_server_that_never_gets_ready_is_stopped_even_if_it_does_not_want_to(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    server = Process([sys.executable, "-c", STUBBORN], free_port(), tmp_path / "server.log", limit=2.0)
    with pytest.raises(ValueError, match=r"was not ready within 2 s: (here|it printed nothing)"):
        server.start()
    assert server.exit_code() is None and server.child is None


def test_a_program_that_is_not_there_and_a_port_in_use(tmp_path):
    with pytest.raises(ValueError, match=r"/no-such-program: no such program; run `make engines`"):
        Process(["/no-such-program"], free_port(), tmp_path / "log").start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is in use"):
            Process([sys.executable, "-c", "pass"], port, tmp_path / "log").start()


@pytest.mark.skipif(not process.TOLD, reason="the kernel tells a child of its parent's death on Linux only, through setpriv")
def test_a_server_goes_when_this_process_is_killed(tmp_path):
    port = free_port()
    source = (
        "import sys, time\nfrom pathlib import Path\nfrom specgraft.engines.process import Process\n"
        f"server = Process([sys.executable, '-c', 'import time; time.sleep(600)'], {port}, Path({str(tmp_path / 'log')!r}), limit=0.0)\n"
        "server.stop = lambda: None\n"
        "try:\n    server.start()\nexcept ValueError:\n    print(server.child.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)


def test_the_environment_is_added_to_this_one(tmp_path):
    server = Process(["x"], 1, tmp_path / "log", environment={"SPECGRAFT_X": "1"})
    assert server.environment["SPECGRAFT_X"] == "1" and server.environment["PATH"] == os.environ["PATH"]
