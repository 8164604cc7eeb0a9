"""A bounded queue between a producer thread and the trainer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class MemoryStream(Generic[Item]):
    """Runs `source` in a thread, at most `bound` ahead: so many items, or whatever `size` counts (one item is always admitted).

    An error of the producer is raised at the consumer, behind what it made before. Closing (or leaving the `with` block) stops the
    producer, also when it is blocked on a full queue.
    """

    def __init__(self, source: Iterable[Item], bound: float = 4, size: Callable[[Item], float] = lambda item: 1) -> None:
        self.bound, self.size = bound, size
        self.held = self.peak = 0.0  # of `size`, waiting in the queue
        self._items: deque[Item] = deque()
        self._change = threading.Condition()
        self._stop = self._ended = False
        self._error: BaseException | None = None
        self._source = source
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._items)

    def _fill(self) -> None:
        """What the thread does until it is stopped or all is made."""
        for item in self._source:
            if not self._offer(item):
                break
        if isinstance(self._source, Generator):  # what works ahead behind it stops with it
            self._source.close()

    def _produce(self) -> None:
        try:
            self._fill()
        except BaseException as error:  # handed over, not swallowed
            self._error = error
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _offer(self, item: Item) -> bool:
        size = self.size(item)
        with self._change:
            while not self._stop and self._items and self.held + size > self.bound:
                self._change.wait()
            if not self._stop:
                self._items.append(item)
                self.held += size
                self.peak = max(self.peak, self.held)
                self._change.notify_all()
            return not self._stop

    def __iter__(self) -> Iterator[Item]:
        while True:
            with self._change:
                while not self._items and not self._ended:
                    self._change.wait()
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self.held -= self.size(item)
                self._change.notify_all()
            yield item

    def close(self) -> None:
        with self._change:
            self._stop = True
            self._change.notify_all()
        self._thread.join(timeout=10)

    def __enter__(self) -> MemoryStream[Item]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
