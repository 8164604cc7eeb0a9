"""Who answers: the target in this process, or servers of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from specgraft.config import RunConfig
from specgraft.regen.dialogue import Dialogue
from specgraft.regen.sampling import request_seed, turn_name

Done = Callable[[int, list[int], str], None]  # index, generated ids with the end token, "stop" or "length"


class Answerer(Protocol):
    def __call__(self, waiting: Sequence[Dialogue], done: Done, note: Callable[[str], None]) -> None:
        """Answers the turn that each dialogue waits with; `done` is called in this thread, in any order, once for each.

        `note` is for the progress bar. Raises ValueError, after what was finished has been handed over.
        """


class InProcess:
    """Answers of a loaded target: the same list of dialogues gives the same ids again."""

    def __init__(self, target: Any, config: RunConfig, generate: Callable[..., None]) -> None:
        self.target, self.config, self.generate = target, config, generate

    def __call__(self, waiting: Sequence[Dialogue], done: Done, note: Callable[[str], None]) -> None:
        from specgraft.targets.generate import Request
        from specgraft.targets.sampling import uniforms

        requests = []
        for dialogue in waiting:
            how, name = dialogue.sampling, turn_name(dialogue.prompt.id, dialogue.turn)
            assert dialogue.asked is not None
            uniform = uniforms(self.config.run.seed, name, how.max_new_tokens) if how.temperature > 0 else None
            requests.append(Request(dialogue.asked, how.max_new_tokens, how.temperature, how.top_p, how.top_k, uniform))
        began = time.monotonic()

        def shown(finished: int, tokens: int) -> None:
            note(f"{finished}/{len(requests)} of this pass, {tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s")

        self.generate(self.target, requests, self.config.regen.batch, shown)
        for index, request in enumerate(requests):
            done(index, request.output, request.finish_reason)


class Servers:
    """Answers of servers, by token ids. Each request is retried elsewhere or later; see `engines.client.Pool`."""

    def __init__(self, config: RunConfig, end_ids: Collection[int]) -> None:
        from specgraft.engines.client import Pool

        part = config.regen
        self.config, self.end_ids = config, tuple(sorted(end_ids))
        self.pool = Pool(part.servers, part.engine, part.concurrency, part.timeout, part.retries)

    def __call__(self, waiting: Sequence[Dialogue], done: Done, note: Callable[[str], None]) -> None:
        from specgraft.engines.client import Ask, Reply

        asks = []
        for dialogue in waiting:
            how = dialogue.sampling
            assert dialogue.asked is not None
            asks.append(
                Ask(
                    ids=dialogue.asked,
                    max_new_tokens=how.max_new_tokens,
                    temperature=how.temperature,
                    top_p=how.top_p,
                    top_k=how.top_k,
                    seed=request_seed(self.config.run.seed, turn_name(dialogue.prompt.id, dialogue.turn)),
                    stop_ids=self.end_ids,
                )
            )
        began, tokens = time.monotonic(), 0

        def heard(index: int, reply: Reply) -> None:
            nonlocal tokens
            tokens += len(reply.ids)
            note(f"{tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s")
            done(index, reply.ids, reply.finish_reason)

        self.pool.run(asks, heard)
