"""One writer of a folder at a time, over processes and machines that share it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Waits for its turn. Raises ValueError naming the folder where the file system has no locks; a process that dies gives its up."""
    with folder.with_name(f".{folder.name}.lock").open("a") as handle:  # beside it: it is no part of what is in there
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(f"{folder}: its file system takes no lock ({error.strerror}); set run.root to a folder on another one") from None
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def alone(path: Path, patience: float = 10.0) -> Iterator[None]:
    """Holds the file `path` for this process alone. `patience`: seconds for one that was just killed to be gone.

    Raises ValueError naming its folder where another process keeps it. A file system without locks guards nothing.
    """
    until = time.monotonic() + patience
    with path.open("a") as handle:  # closing it gives it up
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ValueError(f"{path.parent}: another process trains in this folder; wait for its end, or use another run.name") from None
                time.sleep(0.2)
                continue
            except OSError:
                pass
            break
        yield
