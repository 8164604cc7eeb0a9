"""A bounded queue between a producer thread and the trainer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_END = object()


class MemoryStream(Generic[Item]):
    """Runs `source` in a thread, at most `bound` items ahead. An error of the producer is raised at the consumer.

    Closing (or leaving the `with` block) stops the producer, also when it is blocked on a full queue.
    """

    def __init__(self, source: Iterable[Item], bound: int = 4) -> None:
        self._queue: queue.Queue[object] = queue.Queue(maxsize=bound)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, args=(source,), daemon=True)
        self._thread.start()

    def _produce(self, source: Iterable[Item]) -> None:
        try:
            for item in source:
                if not self._offer(item):
                    break
            if isinstance(source, Generator):  # what works ahead behind it stops with it
                source.close()
        except BaseException as error:  # handed over, not swallowed
            self._error = error
        self._offer(_END)

    def _offer(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Item]:
        while True:
            item = self._queue.get()
            if item is _END:
                if self._error is not None:
                    raise self._error
                return
            yield item  # type: ignore[misc]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def __enter__(self) -> MemoryStream[Item]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
