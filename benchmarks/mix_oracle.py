"""A second opinion on a mix that shares no code with it: texts read from the raw files, units by the names of characters, every pair counted."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ALONE = ("HANGUL", "HIRAGANA", "KATAKANA", "CJK UNIFIED", "CJK COMPAT", "THAI", "LAO", "MYANMAR", "KHMER")


def raw_records(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Every record as it stands in the files, by `file name/id`."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                record = json.loads(line)
                found[f"{path.stem}/{record['id']}"] = record
    return found


def naive_units(text: str, mask: bool = True) -> list[str]:
    """One character after the other: a unit of its own, or a part of a word or of a number."""
    out: list[str] = []
    last = ""
    chars = unicodedata.normalize("NFKC", text).casefold()
    for place, char in enumerate(chars):
        if unicodedata.name(char, "").startswith(ALONE):
            kind = "alone"
        elif unicodedata.category(char) == "Nd":
            kind = "number"
        elif char in ".," and last == "number" and unicodedata.category(chars[place + 1 : place + 2] or " ") == "Nd":
            kind = "number"
        else:
            kind = "word" if char.isalnum() else ""
        if kind in ("word", "number") and kind == last:
            out[-1] += char
        elif kind:
            out.append(char)
        last = kind
    return ["0" if mask and unicodedata.category(unit[0]) == "Nd" else unit for unit in out]


def asked(record: dict[str, Any]) -> list[str]:
    return [message["content"] or "" for message in record["messages"] if message["role"] in ("user", "tool")]


def naive_grams(record: dict[str, Any]) -> set[tuple[str, ...]]:
    found = naive_units("\n".join(asked(record)))
    return {tuple(found[place : place + 3]) for place in range(len(found) - 2)} or {tuple(found)}


def similarities(sets: Sequence[set[tuple[str, ...]]]) -> Iterator[tuple[int, np.ndarray]]:
    """For each set its Jaccard index with every set before it: all shared grams are counted, no pair is passed over."""
    postings: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = np.array([len(one) for one in sets])
    for place, one in enumerate(sets):
        rows = [np.array(postings[gram]) for gram in one if postings[gram]]
        shared = np.bincount(np.concatenate(rows), minlength=place) if rows else np.zeros(place, int)
        yield place, shared / (sizes[:place] + sizes[place] - shared)
        for gram in one:
            postings[gram].append(place)


def same_frame(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Same language, same system text, same tools: word by word, numbers aside."""

    def of(record: dict[str, Any]) -> list[Any]:
        system = " ".join(m["content"] or "" for m in record["messages"] if m["role"] in ("system", "developer"))
        return [record["language"], naive_units(system), naive_units(json.dumps(record.get("tools") or [], ensure_ascii=False, sort_keys=True))]

    return of(one) == of(other)


def runs_shared(records: dict[str, dict[str, Any]], suite: dict[str, dict[str, Any]], words: int) -> list[dict[str, Any]]:
    """Every record that shares a run of `words` units with a suite's user turn, and in how many items of the suite that run stands."""

    def runs(text: str) -> set[tuple[str, ...]]:
        found = naive_units(text, mask=False)
        return {tuple(found[place : place + words]) for place in range(len(found) - words + 1)}

    per_item = [
        set().union(*(runs(m["content"] or "") for m in record["messages"] if m["role"] == "user")) for record in suite.values()
    ]
    items = Counter(run for held in per_item for run in held)
    found = []
    for name, record in records.items():
        shared = set().union(*(runs(text) for text in asked(record))) & items.keys()
        if shared:
            rarest = min(shared, key=lambda run: (items[run], run))
            found.append({"id": name, "run": " ".join(rarest), "items": items[rarest]})
    return found
