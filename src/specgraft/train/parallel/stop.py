"""SIGTERM asks a run to stop behind its present step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

FILE = "SPECGRAFT_STOP"  # in the environment of a worker that no signal reaches: the file that asks it to stop


class Stopped(SystemExit):
    """A run has saved and ends, as it was asked to: exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Stop:
    """While it is entered, SIGTERM is noted in place of ending the process. In a thread that is not the main one only the file asks."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    @property
    def asked(self) -> bool:
        return self._asked or (FILE in os.environ and os.path.exists(os.environ[FILE]))

    def _note(self, *_: object) -> None:
        self._asked = True

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
