"""A file of hidden states that a vLLM server left: waited for, read, compared with what was asked for, deleted.

Legend: T tokens, L layers, D hidden size.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specgraft.engines.wire import Failed, Unusable

LATE = 5.0  # seconds until a lock file must be seen, which the server made before it answered
POLL = 0.01
LAYER_IDS = "output of layer i, pre-norm"  # what the header must say of its ids
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class StatesFile:
    """What one file holds. Filled by `read_states`."""

    ids: list[int]
    layers: list[int]
    states: torch.Tensor  # [T, L, D]


def take_states(path: Path, timeout: float, stopped: Callable[[], bool] = lambda: False) -> StatesFile:
    """Waits until the server has written the file, reads it and deletes it and its lock, whatever it holds.

    Raises Failed for one that is late, missing, cut off or could not be written, Unusable for one that says not what it holds,
    or a folder without locks.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        said = _wait(path, lock, time.monotonic() + timeout, stopped)
        if not path.exists():
            raise Failed(f"its states were not written ({said or 'it ended before that'}); folder {path.parent}", server=True)
        return read_states(path)
    finally:
        for file in (path, lock):
            file.unlink(missing_ok=True)


def _wait(path: Path, lock: Path, end: float, stopped: Callable[[], bool]) -> str:
    """Returns when the server has let go of the lock, with what it wrote there: why there is no file."""
    late = time.monotonic() + LATE
    while not stopped():
        now = time.monotonic()
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return " ".join(file.read(400).split())
        except FileNotFoundError:
            if now > late:
                raise Failed(f"its states are not in {path.parent}: is that the folder that it was started with, and is its disk full?", server=True) from None
        except BlockingIOError:
            if now > end:
                raise Failed("its states are still not written", server=True) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise Unusable(f"{path.parent}: no file can be locked there ({error.strerror}); use a local folder, such as /dev/shm") from None
            raise
        time.sleep(POLL)
    raise Failed("the run was stopped", server=False)


def read_states(path: Path) -> StatesFile:
    """Raises Failed for a file that is cut off, Unusable for one that does not say which layers it holds."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {}).get("specgraft", "{}"))
            states, ids = (file.get_tensor(name).clone() for name in ("hidden_states", "token_ids"))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise Failed(f"a damaged file of states ({str(error).splitlines()[0][:120]})", server=False) from None
    if note.get("layer_ids") != LAYER_IDS or not isinstance(note.get("layers"), list):
        raise Unusable("its files do not say which layers they hold: start it with `specgraft serve vllm TARGET --taps ...`")
    return StatesFile(ids.tolist(), note["layers"], states)
