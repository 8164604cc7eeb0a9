"""Where recorded answers lie in rendered ids: by counting tokens, never by looking for text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A whole render of a conversation with the answers that it holds as they were written."""

    ids: list[int]  # [T]
    mask: list[bool]  # [T] True where the target would have written the token
    turns: tuple[int, ...] = ()  # places of the supervised answers among the messages


@dataclass(frozen=True)
class Span:
    """One answer in the render that ends with it. Filled by `render.Chat`."""

    turn: int  # its place among the messages
    ids: list[int]  # render up to and including this message
    start: int  # tokens of the render before it, generation prompt included
    stop: int  # behind the end token that the target would write


def begins_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    return len(ids) >= len(prefix) and list(ids[: len(prefix)]) == list(prefix)


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def answer_span(
    turn: int, whole: list[int], start: int, end_ids: Collection[int], closing: Sequence[int], special: Collection[int]
) -> Span | None:
    """The answer that `whole` has from `start` on; None where there is nothing but an end.

    It ends with the first end token, for there the target stops: what the template puts behind is not the target's. Where the
    template writes none of the end tokens, the answer ends before `closing`, the ids that end every turn of this template, and
    takes in a special token at their head.
    """
    stop = start
    tail = whole[start:]
    ends = [place for place, token in enumerate(tail) if token in end_ids]
    if ends:
        stop += ends[0] + 1
        written = ends[0]
    else:
        close = len(closing) if closing and tail[-len(closing) :] == list(closing) else 0
        written = len(tail) - close
        stop += written + (1 if close and closing[0] in special else 0)
    return Span(turn, whole, start, stop) if written else None


def rows_of(spans: Sequence[Span], end_ids: Collection[int]) -> list[Row]:
    """As few rows as hold every answer as it was written, in order of their first answer.

    The render that ends with the last answer comes first; an answer before it is supervised there if that render begins with
    the answer's own, and else in a row of its own (templates drop old reasoning, or end the last turn otherwise).
    """
    made: list[tuple[list[int], list[bool], list[int]]] = []
    for span in sorted(spans, key=lambda span: -span.turn):
        own = span.ids[: span.stop]
        row = next((row for row in made if begins_with(row[0], own)), None)
        if row is None:
            row = (span.ids, [False] * len(span.ids), [])
            made.append(row)
        ids, mask, turns = row
        stop = span.stop
        if ids[stop - 1] not in end_ids and stop == len(span.ids) < len(ids) and ids[stop] in end_ids:
            stop += 1  # the header of the next turn is the end token (GLM)
        mask[span.start : stop] = [True] * (stop - span.start)
        turns.insert(0, span.turn)
    return sorted((Row(ids, mask, tuple(turns)) for ids, mask, turns in made), key=lambda row: row.turns)
