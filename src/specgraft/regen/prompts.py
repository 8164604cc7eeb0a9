"""Prompts for `regen`: the built-in set, or any JSONL file in OpenAI messages format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from math import floor
from pathlib import Path
from typing import Any

from specgraft.records import Prompt
from specgraft.regen.builtin.family import expand, stable_int
from specgraft.regen.builtin.registry import DOMAINS, LANGUAGES, families

DEFAULT_LANGUAGES = {"en": 0.6, "ko": 0.2, "ja": 0.2}
DEFAULT_DOMAINS = {"chat": 0.4, "code": 0.25, "math": 0.2, "tool": 0.15}
ROLES = ("system", "developer", "user", "assistant", "tool")

Cell = tuple[str, str]  # language, domain


def builtin_prompts(
    count: int | None = None,
    *,
    seed: int = 0,
    languages: dict[str, float] | None = None,
    domains: dict[str, float] | None = None,
    keep: Callable[[str], bool] | None = None,
) -> list[Prompt]:
    """Return `count` prompts of the built-in set, mixed by the weights; the same list on every machine.

    Weights need not sum to 1; a cell (language, domain) gets its share of `count` by largest remainder. Without
    `count`: as many prompts as the weights allow. `seed` picks which prompts of a cell come first; ids depend on
    the text alone. Families take turns, so that a small set already holds many. A larger `count` with the same seed
    and weights adds to the smaller set (rounding can move one prompt per cell). `keep` limits the set to families
    whose name it accepts; the weights then hold within what is left.
    ValueError: unknown language or domain, weights without a positive one, or more prompts than a cell holds.
    """
    shares = _shares(languages or DEFAULT_LANGUAGES, domains or DEFAULT_DOMAINS)
    cells = {cell: [p for p in _cell_order(*cell, seed) if keep is None or keep(p.family)] for cell in shares}
    held = {cell: len(prompts) for cell, prompts in cells.items()}
    if count is None:
        count = _largest_count(shares, held)
    if count < 0:
        raise ValueError(f"count is {count}: ask for 0 or more prompts")
    wanted = _apportion(count, shares)
    short = [
        f"{language}-{domain} (wanted {wanted[language, domain]}, available {held[language, domain]})"
        for language, domain in shares
        if wanted[language, domain] > held[language, domain]
    ]
    if short:
        raise ValueError(
            f"the built-in prompts cannot fill {', '.join(short)}: lower count ({count}) or change the weights"
        )
    placed = []
    for number, (cell, share) in enumerate(shares.items()):
        for place, prompt in enumerate(cells[cell][: wanted[cell]]):
            placed.append(((place + 0.5) / share, number, prompt))
    placed.sort(key=lambda item: item[:2])
    return [prompt for _, _, prompt in placed]


def builtin_counts() -> dict[str, int]:
    """Return how many built-in prompts each cell holds, keyed like `en-chat`."""
    return {
        f"{language}-{domain}": len(_cell_prompts(language, domain)) for language in LANGUAGES for domain in DOMAINS
    }


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a JSONL file: one `{"messages": [...]}` per line, in OpenAI format, blank lines skipped.

    Optional per line: `id` (else derived from the content), `family` (else the id), `language` (else "und"),
    `domain` (else "chat"), `tools` (an OpenAI function list, or that list as a JSON string).
    ValueError: one line naming the file, the line number, what is wrong and what to do.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the path of a JSONL file of prompts") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file") from None
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line)
            _require(
                prompt.id not in lines,
                f"id {prompt.id!r} is already on line {lines.get(prompt.id)}; give every prompt its own id, "
                "or remove the line if it is a copy",
            )
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path}: holds no prompts; write one {{"messages": [...]}} object per line')
    return prompts


def split_of(family: str, held_out: float) -> str:
    """Return "heldout" for about the share `held_out` (0 to 1) of all family names and "train" for the others.

    Decided by the SHA-256 of the name alone: raising `held_out` only moves families from train to held-out.
    ValueError: `held_out` outside 0 to 1.
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"held_out is {held_out}: give a share between 0 and 1")
    draw = int.from_bytes(hashlib.sha256(family.encode()).digest()[:6], "big")
    return "heldout" if draw / 2**48 < held_out else "train"


def _content_id(messages: Any, tools: Any) -> str:
    content = json.dumps([list(messages), list(tools)], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


@cache
def _cell_prompts(language: str, domain: str) -> tuple[Prompt, ...]:
    """All prompts of a cell, distinct by the text of their messages."""
    cell = f"{language}-{domain}"
    seen: set[tuple[str, ...]] = set()
    prompts = []
    for family in families(language, domain):
        name = f"{cell}-{family.name}"
        tools = tuple(family.tools)
        for messages in expand(family, cell):
            text = tuple(message["content"] for message in messages)
            if text in seen:
                continue
            seen.add(text)
            prompts.append(
                Prompt(f"{name}-{_content_id(messages, tools)}", name, language, domain, tuple(messages), tools)
            )
    return tuple(prompts)


def _cell_order(language: str, domain: str, seed: int) -> list[Prompt]:
    """The prompts of a cell in the order they are given out: families take turns, both shuffled by `seed`."""
    by_family: dict[str, list[Prompt]] = {}
    for prompt in _cell_prompts(language, domain):
        by_family.setdefault(prompt.family, []).append(prompt)
    queues = []
    for family in sorted(by_family, key=lambda name: (stable_int(seed, name), name)):
        queues.append(sorted(by_family[family], key=lambda prompt: (stable_int(seed, prompt.id), prompt.id)))
    longest = max(map(len, queues), default=0)
    return [queue[place] for place in range(longest) for queue in queues if place < len(queue)]


def _shares(languages: Mapping[str, float], domains: Mapping[str, float]) -> dict[Cell, float]:
    for what, weights, known in (("language", languages, LANGUAGES), ("domain", domains, DOMAINS)):
        for name, weight in weights.items():
            if name not in known:
                raise ValueError(f"no built-in prompts for {what} {name!r}: choose from {', '.join(known)}")
            if not 0 <= weight < float("inf"):
                raise ValueError(f"the weight of {what} {name!r} is {weight}: give a number of 0 or more")
        if not sum(weights.values()) > 0:
            raise ValueError(f"no {what} has a positive weight: give at least one")
    total = sum(languages.values()) * sum(domains.values())
    return {
        (language, domain): languages[language] * domains[domain] / total
        for language in LANGUAGES
        for domain in DOMAINS
        if languages.get(language, 0) > 0 and domains.get(domain, 0) > 0
    }


def _apportion(count: int, shares: Mapping[Cell, float]) -> dict[Cell, int]:
    """Largest remainder; exact quotas are rounded to 9 digits so that float noise decides nothing."""
    quotas = {cell: round(count * share, 9) for cell, share in shares.items()}
    seats = {cell: floor(quota) for cell, quota in quotas.items()}
    by_remainder = sorted(shares, key=lambda cell: (-round(quotas[cell] - seats[cell], 9), -shares[cell], cell))
    for cell in by_remainder[: count - sum(seats.values())]:
        seats[cell] += 1
    return seats


def _largest_count(shares: Mapping[Cell, float], held: Mapping[Cell, int]) -> int:
    count = min(floor((held[cell] + 1) / share) for cell, share in shares.items())
    while count > 0 and any(seats > held[cell] for cell, seats in _apportion(count, shares).items()):
        count -= 1
    return count


def _parse_line(line: str) -> Prompt:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ValueError(f"bad JSON ({what}); write one JSON object per line") from None
    _require(isinstance(record, dict), 'not a JSON object; write {"messages": [...]}')
    messages = _parse_messages(record.get("messages"))
    tools = _parse_tools(record.get("tools"))
    texts = {}
    for key in ("id", "family", "language", "domain"):
        value = record.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and key in ("id", "family"):
            value = str(value)
        _require(
            value is None or (isinstance(value, str) and value.strip() != ""),
            f"{key} is {json.dumps(value)[:40]}; give a non-empty string or leave it out",
        )
        _require(
            value is None or value.isprintable(),  # half a surrogate pair is not; names appear in messages of one line
            f"{key} {json.dumps(value)[:40]} holds a line break or another unprintable character; use plain text",
        )
        texts[key] = value
    name = texts["id"] or f"prompt-{_content_id(messages, tools)}"
    return Prompt(name, texts["family"] or name, texts["language"] or "und", texts["domain"] or "chat", messages, tools)


def _parse_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    _require(
        isinstance(messages, list) and len(messages) > 0,
        'no messages; give "messages": [{"role": "user", "content": "..."}]',
    )
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        _require(isinstance(message, dict), f"{where} is not an object; give role and content")
        role = message.get("role")
        _require(role in ROLES, f"{where} has unknown role {json.dumps(role)[:40]}; use one of {', '.join(ROLES)}")
        _check_content(message.get("content"), where)
    last = messages[-1]
    _require(
        last["role"] != "assistant",
        "the last message is from the assistant; remove it, as the target writes that answer itself",
    )
    _require(
        last["role"] in ("user", "tool"),
        f"the last message is from {last['role']}; end with the user turn to be answered",
    )
    _require(bool(last.get("content")), "the last message has no content; give the text to be answered")
    return tuple(messages)


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, list):
        kinds = {str(part.get("type", "")) for part in content if isinstance(part, dict)} - {"text"}
        _require(not kinds, f"{where} holds {', '.join(sorted(kinds))}; remove images and other media: text only")
        _require(False, f"{where} has a list as content; join its text parts into one string")
    _require(
        content is None or isinstance(content, str),
        f"{where} has {type(content).__name__} as content; give a string or null",
    )
    _require(
        not any("\ud800" <= char <= "\udfff" for char in content or ""),
        f"{where} holds half a surrogate pair; write the character itself",
    )


def _parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise ValueError("tools is a string that is not JSON; give the OpenAI function list") from None
    if tools is None:
        return ()
    _require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
        "tools is not a list of objects; give the OpenAI function list",
    )
    return tuple(tools)


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)
