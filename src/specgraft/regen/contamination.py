"""Contamination: prompts that share a run of words with a benchmark suite.

The user and tool turns of a prompt are compared with those of every item (of an agent's history: up to its first answer): a run of n units in both (words, or characters in
Korean, Japanese and Chinese; numbers count as they are) is a hit. Items with fewer than n units are hits when a turn holds the whole
item, those with fewer than half when a turn is the item. Runs that stand in many items of one suite are its wording ("put your final
answer within ..."), not an item: they are left out and counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from specgraft.config import SourceSection
from specgraft.records import Prompt
from specgraft.regen.near_duplicates import asked_texts, units
from specgraft.regen.sources import read_source

WORDING_ITEMS, WORDING_SHARE = 5, 50  # a run in 5 items, and in one of 50: the suite's own wording


class Hit(NamedTuple):
    """A run of units in a prompt and in a suite."""

    suite: str
    item: str
    run: str


@dataclass
class Suites:
    """Runs of all suites, looked up by what a text holds."""

    words: int  # n
    runs: dict[str, tuple[str, str]] = field(default_factory=dict)  # run -> suite, item
    whole: dict[str, tuple[str, str]] = field(default_factory=dict)  # short items: a turn must be this
    lengths: dict[tuple[str, str], set[int]] = field(default_factory=dict)  # first two units of a run -> lengths of such runs
    summary: list[dict[str, object]] = field(default_factory=list)  # per suite: path, items, runs, wording

    def hit(self, texts: Sequence[str]) -> Hit | None:
        """The first run that one of `texts` shares with a suite."""
        for text in texts:
            found = units(text, mask_numbers=False)
            if where := self.whole.get(" ".join(found)):
                return Hit(*where, " ".join(found))
            for place, start in enumerate(pairwise(found)):
                for length in sorted(self.lengths.get(start, ())):
                    run = " ".join(found[place : place + length])
                    if place + length <= len(found) and (where := self.runs.get(run)):
                        return Hit(*where, run)
        return None


def read_suites(paths: Sequence[str], words: int) -> Suites:
    """Suites of JSONL files, in any shape of `schema`. Raises ValueError for a bad row: an item that is not seen guards nothing."""
    suites = Suites(words)
    for path in paths:
        read = read_source(SourceSection(path=path))
        if read.rejected:
            raise ValueError(f"{path}:{read.rejected[0].line}: {read.rejected[0].reason}")
        _add(suites, path, {prompt.id.removeprefix(f"{read.name}/"): compared(prompt) for prompt in read.prompts})
    return suites


def compared(prompt: Prompt) -> list[str]:
    """The turns that a suite's text could stand in. Of an agent's history the task alone: what its commands print is the same everywhere."""
    if prompt.domain != "agent":
        return asked_texts(prompt)
    roles = [message["role"] for message in prompt.messages]
    return asked_texts(dataclasses.replace(prompt, messages=prompt.messages[: roles.index("assistant") if "assistant" in roles else None]))


def _add(suites: Suites, path: str, items: dict[str, list[str]]) -> None:
    name = Path(path).stem
    held = Counter(run for texts in items.values() for run in {run for text in texts for run in _runs(text, suites.words)})
    wording = {run for run, count in held.items() if count >= WORDING_ITEMS and count * WORDING_SHARE >= len(items)}
    for item, texts in items.items():
        for text in texts:
            for run in _runs(text, suites.words):
                if run in wording:
                    continue
                known = run.split(" ")
                if len(known) * 2 < suites.words:
                    suites.whole.setdefault(run, (name, item))
                else:
                    suites.runs.setdefault(run, (name, item))
                    suites.lengths.setdefault((known[0], known[1]), set()).add(len(known))
    suites.summary.append({"path": path, "items": len(items), "runs": len(held) - len(wording), "wording": len(wording)})


def _runs(text: str, words: int) -> Iterator[str]:
    """Runs of `words` units; of a shorter text the whole."""
    found = units(text, mask_numbers=False)
    if found:
        yield from (" ".join(found[place : place + words]) for place in range(max(len(found) - words + 1, 1)))
