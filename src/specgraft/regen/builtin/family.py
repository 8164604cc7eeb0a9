"""A family of prompts: templates of one task, and the slots that fill them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .particles import with_particle

_SLOT = re.compile(r"\{([a-z]\w*)(?:\.(\w+))?(?::([^{}\s]+))?\}")

Template = str | tuple[str, ...]  # one user turn, or user, assistant, user, ... ending with the user


@dataclass(frozen=True)
class Family:
    """Templates about one task. `expand` turns it into at most `limit` distinct prompts.

    A template names its slots as `{slot}`, `{slot.key}` (slot values that are tuples or dicts: values that belong
    together) or `{slot:form}`; forms are `A` (capitalise), `an`, `An` (a/an in front) and the Korean particle pairs of
    `particles`. Braces around anything that is not a slot stay as they are. `derive` adds values computed from the
    chosen ones, or returns None to drop the combination.
    """

    name: str
    templates: Sequence[Template]
    slots: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    system: Sequence[str] = ()  # system messages to choose from
    system_share: float = 0.0  # share of the prompts that get one; drawn by the text, so that it adds no duplicates
    tools: Sequence[dict[str, Any]] = ()
    limit: int = 260
    derive: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


def fill_in(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a `derive` that fills the slots which appear inside the values of the slots `names`."""
    return lambda values: {name: _fill(values[name], values) for name in names}


def stable_int(*parts: object) -> int:
    """Return a 64-bit integer that depends on `parts` alone, the same on every machine and Python version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def expand(family: Family, cell: str) -> Iterator[list[dict[str, str]]]:
    """Yield the messages of each prompt of `family`, distinct by text; `cell` is like `en-chat`."""
    seen: set[tuple[str, ...]] = set()
    budget = -(-family.limit // len(family.templates))
    for number, template in enumerate(family.templates):
        turns = (template,) if isinstance(template, str) else template
        for values in _combinations(family, turns, budget, f"{cell}/{family.name}/{number}"):
            text = tuple(_fill(turn, values) for turn in turns)
            messages = _messages(family, text, values)
            key = tuple(message["content"] for message in messages)
            if key not in seen:
                seen.add(key)
                yield messages


def _combinations(family: Family, turns: tuple[str, ...], budget: int, salt: str) -> Iterator[dict[str, Any]]:
    named = {match[1] for turn in (*turns, *family.system) for match in _SLOT.finditer(turn)}
    names = list(family.slots) if family.derive else [name for name in family.slots if name in named]
    total = prod(len(family.slots[name]) for name in names)
    tries = range(total) if total <= budget else (stable_int(salt, i) % total for i in range(budget * 4))
    used: set[int] = set()
    for index in tries:
        if len(used) >= budget:
            return
        if index in used:
            continue
        values: dict[str, Any] = {}
        rest = index
        for name in names:
            rest, place = divmod(rest, len(family.slots[name]))
            values[name] = family.slots[name][place]
        if family.derive:
            more = family.derive(values)
            if more is None:
                continue
            values |= more
        used.add(index)
        yield values


def _fill(text: str, values: Mapping[str, Any]) -> str:
    def replace(match: re.Match[str]) -> str:
        name, key, form = match.groups()
        if name not in values:
            return match[0]
        value = values[name]
        if key is not None:
            value = value[int(key)] if key.isdigit() else value[key]
        return _inflect(str(value), form)

    return _SLOT.sub(replace, text)


def _inflect(word: str, form: str | None) -> str:
    if form is None:
        return word
    if form == "A":
        return word[:1].upper() + word[1:]
    if form in ("an", "An"):
        return f"{form if word[:1].lower() in 'aeiou' else form[0]} {word}"
    return with_particle(word, form)


def _messages(family: Family, text: tuple[str, ...], values: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(text)]
    draw = stable_int("system", family.name, *text)
    if family.system and draw % 1000 < family.system_share * 1000:
        system = family.system[(draw // 1000) % len(family.system)]
        messages.insert(0, {"role": "system", "content": _fill(system, values)})
    return messages
