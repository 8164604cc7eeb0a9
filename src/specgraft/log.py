"""What a run says while it works: progress on the terminal, metrics in a JSONL file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# of the processes that torchrun starts, the first speaks
console = Console(
    stderr=True, highlight=False, soft_wrap=True, quiet="TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
)


def say(text: str) -> None:
    """One line for the user, on stderr: stdout is for results."""
    console.print(text, markup=False)


class Bar:
    """Progress of one stage. On a terminal a bar; elsewhere a line every ten seconds."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="") if progress else None
        self._started = self._spoken = time.monotonic()
        self._first = 0

    def at(self, done: int, note: str = "") -> None:
        """`done` of `total` is finished; `note` is shown beside it."""
        self.done = done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self._spoken >= 10:
            self._spoken = now
            say(f"{self.what}: {done}/{self.total} {note}")


@contextmanager
def progress(what: str, total: int) -> Iterator[Bar]:
    """A progress bar for `total` units of work."""
    if not sys.stderr.isatty():
        bar = Bar(what, total, None)
        yield bar
        say(f"{what}: {bar.done}/{total} done in {time.monotonic() - bar._started:.0f} s")
        return
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as shown:
        yield Bar(what, total, shown)


class Metrics:
    """Appends one JSON object a line to `metrics.jsonl`; on resume drops the rows past the step resumed from.

    `board`: a folder in which the numbers are written for TensorBoard too. Raises ValueError where its package is missing.
    """

    def __init__(self, path: Path, resume_step: int = 0, board: Path | None = None) -> None:
        self.path = path
        self._board = board_writer(board, resume_step) if board else None
        if path.exists():
            rows = [row for row in read_metrics(path) if row.get("step", 0) <= resume_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            temporary.replace(path)

    def add(self, **row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])
            self._board.flush()


def board_writer(folder: Path, resume_step: int) -> Any:
    """What writes for TensorBoard; steps behind the one resumed from are hidden there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("train.tensorboard needs the package `tensorboard`: pip install 'specgraft[tensorboard]', or set it to false") from None
    return SummaryWriter(str(folder), purge_step=max(resume_step, 0) + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; a last line cut by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
