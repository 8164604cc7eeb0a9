"""Generations for the report: text in pieces, each with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgraft.decode.loop import Request
from specgraft.evaluate.metrics import accept_length
from specgraft.records import Conversation


def origins(request: Request) -> list[tuple[list[int], str]]:
    """The answer in runs of token ids: "prefill" (first token), then per round accepted "draft" and the "target" token."""
    runs = [(request.output[:1], "prefill")]
    for verdict in request.rounds:
        for ids, kind in (
            (list(verdict.committed[: verdict.accepted]), "draft"),
            (list(verdict.committed[verdict.accepted :]), "target"),
        ):
            if ids:
                runs.append((ids, kind))
    return runs


def pieces(tokenizer: Any, runs: Sequence[tuple[list[int], str]]) -> list[dict[str, str]]:
    """Text of each run. Bytes of a character that a later run completes are shown there; joined, it is the whole text."""
    ids: list[int] = []
    shown, out = "", []
    for number, (more, kind) in enumerate(runs):
        ids += more
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if number < len(runs) - 1:
            text = text.rstrip("\ufffd")
        if text.startswith(shown) and len(text) > len(shown):
            out.append({"text": text[len(shown) :], "kind": kind})
            shown = text
    return out


def spread(conversations: Sequence[Conversation], count: int) -> list[int]:
    """Indices of `count` conversations, a different (language, domain) each as far as there are any."""
    seen: set[tuple[str, str]] = set()
    fresh: list[int] = []
    rest: list[int] = []
    for index, conversation in enumerate(conversations):
        key = (conversation.language, conversation.domain)
        (rest if key in seen else fresh).append(index)
        seen.add(key)
    return (fresh + rest)[:count]


def examples(
    tokenizer: Any, conversations: Sequence[Conversation], requests: Sequence[Request], count: int
) -> list[dict[str, Any]]:
    """Rows of `examples` in evaluate.json."""
    return [
        {
            "prompt_id": conversations[index].prompt_id,
            "language": conversations[index].language,
            "domain": conversations[index].domain,
            "prompt": tokenizer.decode(requests[index].ids, skip_special_tokens=False),
            "accept_length": accept_length([requests[index].rounds]),
            "pieces": pieces(tokenizer, origins(requests[index])),
        }
        for index in spread(conversations, count)
    ]
