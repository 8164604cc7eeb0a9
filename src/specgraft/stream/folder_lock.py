"""One writer of a folder at a time, over processes and machines that share it."""

from __future__ import annotations

import fcntl
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
