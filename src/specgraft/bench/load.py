"""Puts load on one server: so many requests under way, each streamed, everything timed. No torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from specgraft.engines.streaming import Streamed, ask_streaming
from specgraft.engines.wire import Ask, Unusable


@dataclass(frozen=True)
class Item:
    """One prompt of a suite. Filled by the caller that has the target's tokenizer."""

    suite: str
    id: str
    ids: list[int]


@dataclass(frozen=True)
class Served:
    """A server that is up."""

    url: str
    engine: str
    model: str = ""  # the name it serves it under
    vocabulary: int = 0  # ids it may answer with are below this; 0: not checked


@dataclass(frozen=True)
class Answered:
    """One answer, timed. Filled by `drive`; seconds count from when its request was sent."""

    suite: str
    id: str
    repeat: int
    ids: list[int]
    reason: str
    first: float  # seconds to the first piece
    total: float  # to the end
    gaps: list[float] = field(default_factory=list)  # between pieces
    accepted: int | None = None  # drafts; None where the engine does not say, or no drafter is there
    drafted: int | None = None
    steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drive(
    served: Served,
    items: Sequence[Item],
    ask: Callable[[Item], Ask],
    concurrency: int,
    timeout: float,
    repeat: int,
    done: Callable[[Answered], None],
) -> float:
    """Asks every item, `concurrency` at a time, `done` as each ends; seconds from the first request to the last answer.

    Raises ValueError naming the suite, the item and the reason at the first request that fails: a server that is gone,
    silent for `timeout` seconds, answers with an error or with ids that the target does not have. What had ended was handed over.
    """
    return asyncio.run(_drive(served, items, ask, concurrency, timeout, repeat, done))


async def _drive(
    served: Served, items: Sequence[Item], ask: Callable[[Item], Ask], concurrency: int, timeout: float, repeat: int, done: Callable[[Answered], None]
) -> float:
    waiting = list(items)[::-1]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a server may close one that it kept, just when it is used again
    began = time.perf_counter()
    async with httpx.AsyncClient(limits=limits, trust_env=False, follow_redirects=False) as client:

        async def worker() -> None:
            while waiting:
                item = waiting.pop()
                done(await _answer(client, served, item, ask(item), timeout, repeat))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(waiting))):
                    group.create_task(worker())
        except* ValueError as failures:
            raise failures.exceptions[0] from None
    return time.perf_counter() - began


async def _answer(client: httpx.AsyncClient, served: Served, item: Item, ask: Ask, timeout: float, repeat: int) -> Answered:
    where = f"{served.url}: {item.suite}/{item.id}"
    advice = "see to the server and run bench again: what was measured is kept"
    began = time.perf_counter()
    try:
        found = await ask_streaming(client, served.url, served.engine, ask, served.model, timeout)
    except Unusable as error:
        raise ValueError(f"{where}: {error}; {advice}") from None
    except httpx.TimeoutException:
        raise ValueError(f"{where}: nothing came for {timeout:g} s; {advice}") from None
    except httpx.HTTPError as error:
        raise ValueError(f"{where}: the connection broke ({type(error).__name__}); {advice}") from None
    total = time.perf_counter() - began
    if fault := fault_of(found, ask, served.vocabulary):
        raise ValueError(f"{where}: {fault}; {advice}")
    gaps = [later - earlier for earlier, later in zip(found.times, found.times[1:], strict=False)]
    first = found.times[0] if found.times else total
    return Answered(
        item.suite, item.id, repeat, found.ids, found.reason, first, total, gaps, found.accepted, found.drafted, found.steps
    )


def fault_of(found: Streamed, ask: Ask, vocabulary: int) -> str | None:
    """What is wrong with an answer, or None."""
    if len(found.ids) > ask.max_new_tokens:
        return f"{len(found.ids)} ids came and {ask.max_new_tokens} were asked for"
    if vocabulary and (odd := [token for token in found.ids if not 0 <= token < vocabulary]):
        return f"id {odd[0]} came and the target has {vocabulary} ids"
    if found.prompt_tokens is not None and found.prompt_tokens != len(ask.ids):
        return f"the server read {found.prompt_tokens} prompt ids and {len(ask.ids)} were sent"
    return None
