"""Answers of servers as they come in, one line each, until their group is written whole: a kill loses none of them.

Each line is handed to the system at once, and put on the disk every second: that is what a power cut can cost.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from specgraft.records import ids_digest

SYNC = 1.0  # seconds between two waits for the disk
Key = tuple[str, int, str]  # prompt id, turn, digest of the ids that were asked with


def key_of(prompt_id: str, turn: int, asked: list[int]) -> Key:
    return prompt_id, turn, ids_digest(asked)


class Journal:
    """An append-only file of finished answers."""

    def __init__(self, path: Path) -> None:
        """Reads what an earlier run left; a last line that a kill cut is taken off. Raises ValueError for other damage."""
        self.path = path
        self.found: dict[Key, tuple[list[int], str]] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row: dict[str, Any] = json.loads(line)
                key = (str(row["id"]), int(row["turn"]), str(row["asked"]))
                ids, reason = [int(token) for token in row["ids"]], str(row["finish_reason"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number}: damaged; delete the line and run regen again") from None
            self.found.setdefault(key, (ids, reason))
        self._synced = 0.0
        try:
            self._handle = path.open("ab")
            if whole < len(data):
                self._handle.truncate(whole)
        except OSError as error:
            raise self._failed(error) from None

    def add(self, key: Key, ids: list[int], finish_reason: str) -> None:
        """Appends an answer. Raises ValueError, in one line, where the disk refuses it."""
        row = {"id": key[0], "turn": key[1], "asked": key[2], "ids": ids, "finish_reason": finish_reason}
        try:
            self._handle.write(json.dumps(row).encode() + b"\n")
            self._handle.flush()
            if time.monotonic() - self._synced >= SYNC:
                os.fsync(self._handle.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise self._failed(error) from None
        self.found[key] = (ids, finish_reason)

    def close(self) -> None:
        with suppress(OSError):  # what a full disk left unwritten was reported by `add`
            os.fsync(self._handle.fileno())
        with suppress(OSError):
            self._handle.close()

    def _failed(self, error: OSError) -> ValueError:
        return ValueError(f"{self.path}: could not be written ({error.strerror}); free space or set run.root, then run regen again")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
