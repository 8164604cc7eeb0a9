"""A tiny target's conversations as a source of every medium, and a producer that can be told what to do. No test."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from specgraft.config import RunConfig
from specgraft.records import Conversation, Features, ids_digest

HEADER: dict[str, Any] = {
    "target": {"id": "t", "weights": "abc", "dtype": "float32"}, "taps": [0, 2], "dtype": "float32", "hidden_size": 8, "vocab_size": 64,
    "max_length": 256,
}  # fmt: skip


def conversations(count: int, held_out: int = 0, length: int = 12) -> list[Conversation]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        ids = torch.randint(2, 64, (length + number % 7,), generator=generator).tolist()
        found.append(
            Conversation(
                f"p{number}", "f", "en", "chat", "heldout" if number < held_out else "train", ids, [False] * 3 + [True] * (len(ids) - 3),
                3, 0.0, 1.0, 0, "length", ids_digest(ids[3:]),
            )
        )  # fmt: skip
    return found


def features(row: Conversation) -> Features:
    """States that tell of the row's own ids and places."""
    ids = torch.tensor(row.input_ids)
    base = ids[:, None].float() + torch.arange(len(ids))[:, None] / 1000 + 1
    last = base.expand(-1, 8).contiguous()
    return Features(row.prompt_id, ids, torch.tensor(row.loss_mask), torch.stack([last, 2 * last], 1), last)


def fine(row: Features) -> str | None:
    return None if torch.isfinite(row.last).all() else "last not finite"


def digests(rows: Sequence[Conversation]) -> dict[str, str]:
    return {row.prompt_id: ids_digest(row.input_ids) for row in rows}


def config_of(**stream: Any) -> RunConfig:
    return RunConfig.model_validate({"stream": stream, "capture": {"shard_tokens": 64}})


class Maker:
    """Makes features in this process; counts, and breaks what it is told to break."""

    def __init__(self, broken: Sequence[str] = (), error_at: int = -1) -> None:
        self.broken, self.error_at = set(broken), error_at
        self.made: list[str] = []
        self.batches: list[int] = []

    def __call__(self, batches: Any) -> Generator[Features]:
        for batch in batches:
            self.batches.append(len(batch))
            for row in batch:
                if len(self.made) == self.error_at:
                    raise ValueError("the server is gone")
                self.made.append(row.prompt_id)
                found = features(row)
                if row.prompt_id in self.broken:
                    found.last[0] = float("nan")
                yield found


class Held:
    """What a fake producer holds: its speed, and when it breaks."""

    def __init__(self, seconds: float = 0.0, refused: Sequence[str] = ()) -> None:
        self.seconds, self.refused = seconds, set(refused)
        self.asked: list[str] = []


def made(held: Held, rows: Sequence[Conversation], broken: Sequence[str] = (), kill: str = "") -> list[Any]:
    """As `capture.feed.produce`: parcels of rows. `broken` rows have bad states; `kill`: a file that is there once, and whoever finds it dies."""
    import os
    import signal
    import time

    from specgraft.stream.parcels import parcel

    time.sleep(held.seconds * len(rows))
    if kill:
        try:
            os.unlink(kill)
        except FileNotFoundError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    held.asked += [row.prompt_id for row in rows]
    if bad := held.refused & {row.prompt_id for row in rows}:
        raise ValueError(f"no states for {min(bad)}")
    found = [features(row) for row in rows]
    for row in found:
        if row.prompt_id in broken:
            row.last[0] = float("nan")
    return [parcel(row, False, fine) for row in found]


def asked(held: Held) -> list[str]:
    return held.asked


def bytes_of(row: Conversation) -> int:
    return len(row.input_ids) * 3 * 8 * 4
