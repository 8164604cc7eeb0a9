"""What is asked of an engine and what it answers: token ids both ways, whatever the engine calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

END = {"stop", "length"}


@dataclass(frozen=True)
class Ask:
    """One prompt to be continued."""

    ids: list[int]  # the prompt; nothing is put in front of it
    max_new_tokens: int  # new ids at most, the end token counted
    temperature: float = 0  # 0: the most likely token
    top_p: float = 1
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()  # the target's end tokens: the first of them ends the answer
    name: str = ""  # what messages about it say


@dataclass(frozen=True)
class Reply:
    """One answer. `stop` ends with the end token, which is among the ids; `length` was cut at the limit."""

    ids: list[int]
    finish_reason: str


class Failed(Exception):
    """One request failed in a way that another try may not. `server`: its fault, nothing else is sent there for a while."""

    def __init__(self, why: str, server: bool) -> None:
        super().__init__(why)
        self.server = server


class Unusable(ValueError):
    """What an engine sent cannot be used, and asking again would not help. One line: what, and what to do."""


def token_ids(answer: Any, place: str, remedy: str) -> list[int]:
    """The list of ids that an engine sent at `place`. Raises Unusable where there is none (fault R11)."""
    if not isinstance(answer, list) or not all(type(token) is int and token >= 0 for token in answer):
        raise Unusable(f"the answer has no token ids at {place}, and text is never encoded again: {remedy}")
    return answer


def settle(ask: Ask, ids: Sequence[int], stopped: bool, matched: int | None = None) -> Reply:
    """An engine's answer as the target alone gives it: up to its first end token, or cut at the limit.

    `stopped`: the engine says that it met an end token, `matched` which one. An engine may know end tokens that the
    target does not have: such an answer comes back as `other`, to be asked on from there. Raises Unusable for an
    answer that is too short for either.
    """
    kept = list(ids)
    if stopped and matched is not None and (not kept or kept[-1] != matched) and len(kept) < ask.max_new_tokens:
        kept.append(matched)  # the engine stopped at that very id and left it out
    if (end := next((place for place, token in enumerate(kept) if token in ask.stop_ids), None)) is not None:
        return Reply(kept[: end + 1], "stop")
    if len(kept) >= ask.max_new_tokens:
        return Reply(kept[: ask.max_new_tokens], "length")
    if stopped and kept:
        return Reply(kept, "other")
    raise Unusable(
        f"the answer to a prompt of {len(ask.ids)} ids ends behind {len(kept)} new ids, without an end token: "
        f"give the server a context of {len(ask.ids) + ask.max_new_tokens} or more"
    )
