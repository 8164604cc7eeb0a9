"""Prompts for `regen`: the built-in set, or one JSONL file taken as it is; and the one rule that splits families."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from math import floor
from pathlib import Path

from specgraft.records import Prompt
from specgraft.regen.builtin.family import expand
from specgraft.regen.builtin.registry import DOMAINS, LANGUAGES, families
from specgraft.regen.quotas import apportion, in_turns
from specgraft.regen.schema import content_id, parse_line, require

DEFAULT_LANGUAGES = {"en": 0.6, "ko": 0.2, "ja": 0.2}
DEFAULT_DOMAINS = {"chat": 0.4, "code": 0.25, "math": 0.2, "tool": 0.15}

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
    cells = {cell: [p for p in cell_order(*cell, seed) if keep is None or keep(p.family)] for cell in shares}
    held = {cell: len(prompts) for cell, prompts in cells.items()}
    if count is None:
        count = _largest_count(shares, held)
    if count < 0:
        raise ValueError(f"count is {count}: ask for 0 or more prompts")
    wanted = apportion(count, shares)
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
    """Read prompts from a JSONL file: one `{"messages": [...]}` per line (or another shape of `schema`), blank lines skipped.

    Optional per line: `id` (else derived from the content), `family` (else the id), `language` (else "und"),
    `domain` (else "chat"), `tools` (an OpenAI function list, or that list as a JSON string). The first bad line refuses the file;
    `sources.read_source` lists bad lines instead.
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
            prompt = parse_line(line)
            require(
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
                Prompt(f"{name}-{content_id(messages, tools)}", name, language, domain, tuple(messages), tools)
            )
    return tuple(prompts)


def cell_order(language: str, domain: str, seed: int) -> list[Prompt]:
    """The prompts of a cell in the order they are given out: families take turns, both shuffled by `seed`."""
    return in_turns(_cell_prompts(language, domain), seed)


def _shares(languages: Mapping[str, float], domains: Mapping[str, float]) -> dict[Cell, float]:
    for what, weights, known in (("language", languages, LANGUAGES), ("domain", domains, DOMAINS)):
        for name, weight in weights.items():
            if name not in known:
                raise ValueError(f"no built-in prompts for {what} {name!r}: choose from {', '.join(known)}")
            if not 0 <= weight < float("inf"):
                raise ValueError(f"the weight of {what} {name!r} is {weight}: give a number of 0 or more")
        if not sum(weights.values()) < 1e100:
            raise ValueError(f"the {what} weights are too large: divide them all by one number")
        if not sum(weights.values()) > 0:
            raise ValueError(f"no {what} has a positive weight: give at least one")
    total = sum(languages.values()) * sum(domains.values())
    return {
        (language, domain): languages[language] * domains[domain] / total
        for language in LANGUAGES
        for domain in DOMAINS
        if languages.get(language, 0) > 0 and domains.get(domain, 0) > 0
    }


def _largest_count(shares: Mapping[Cell, float], held: Mapping[Cell, int]) -> int:
    count = min(floor((held[cell] + 1) / share) for cell, share in shares.items())
    while count > 0 and any(seats > held[cell] for cell, seats in apportion(count, shares).items()):
        count -= 1
    return count
