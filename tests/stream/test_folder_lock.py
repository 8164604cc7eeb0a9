"""A folder in which one process at a time may train."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgraft.stream.folder_lock import alone

HOLDS = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_another_process_is_refused_and_one_that_is_killed_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        other.stdout.readline()
        with pytest.raises(ValueError, match="another process trains in this folder"), alone(path, 0.1):
            pytest.fail("two hold it")
    finally:
        other.kill()
        other.communicate()
    for _ in range(2):
        with alone(path, 0.0):
            pass


def test_a_file_system_without_locks_guards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with alone(tmp_path / "lock"):
        pass
