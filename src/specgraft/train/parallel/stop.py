"""SIGTERM asks a run to stop behind its present step."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Stopped(SystemExit):
    """A run has saved and ends, as it was asked to: exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Stop:
    """While it is entered, SIGTERM is noted in place of ending the process. In a thread that is not the main one: never asked."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def _note(self, *_: object) -> None:
        self.asked = True

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
