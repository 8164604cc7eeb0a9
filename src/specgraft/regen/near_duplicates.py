"""Near-duplicates: prompts that share a part of their n-grams. An exact join, not an estimate: the same pairs on any machine.

A text becomes units: words, or single characters where a script writes no spaces or a word is a phrase (Korean, Japanese,
Chinese, Thai); numbers are one and the same unit, so that a template filled with other numbers is a near-duplicate. Similarity is
the Jaccard index of the sets of three units in a row.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from specgraft.records import Prompt

GRAM = 3
# Hangul, kana, Han, and the scripts of Thai, Lao, Burmese and Khmer
CHARACTERS = "ᄀ-ᇿ぀-ヿ㄰-㆏ㇰ-ㇿ㐀-䶿一-鿿가-힣豈-﫿\U00020000-\U000323af\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
UNIT = re.compile(rf"[{CHARACTERS}]|[^\W\d_{CHARACTERS}]+|\d+(?:[.,]\d+)*")


def units(text: str, mask_numbers: bool = True) -> list[str]:
    """Words, or characters in scripts as above, in lower case and Unicode form NFKC; punctuation left out."""
    found = UNIT.findall(unicodedata.normalize("NFKC", text).casefold())
    return ["0" if mask_numbers and unit[0].isdigit() else unit for unit in found]


def compared_text(prompt: Prompt) -> str:
    """What makes two prompts alike: every turn except the system's, calls of tools included."""
    turns = []
    for message in prompt.messages:
        if message["role"] not in ("system", "developer"):
            turns.append(message.get("content") or "")
            if message.get("tool_calls"):
                turns.append(json.dumps(message["tool_calls"], ensure_ascii=False, sort_keys=True))
    return "\n".join(turns)


def frame(prompt: Prompt) -> str:
    """What the same words are asked under: language, system text, tools. Prompts of different frames have different answers."""
    system = " ".join(m.get("content") or "" for m in prompt.messages if m["role"] in ("system", "developer"))
    tools = json.dumps(prompt.tools, ensure_ascii=False, sort_keys=True)
    return "\x1f".join([prompt.language, " ".join(units(system)), " ".join(units(tools))])


def grams(text: str) -> frozenset[str]:
    """The set of three units in a row; a shorter text is one gram, one without any unit is its own."""
    found = units(text)
    if len(found) < GRAM:
        return frozenset([" ".join(found) or f"\x1f{text.strip()}"])
    return frozenset(" ".join(found[place : place + GRAM]) for place in range(len(found) - GRAM + 1))


class Pair(NamedTuple):
    """Two texts by their places, `first` < `second`, and what they share."""

    first: int
    second: int
    shared: int  # grams in both
    union: int  # grams in either

    def reaches(self, share: Fraction) -> bool:
        return self.shared * share.denominator >= self.union * share.numerator


def exact(share: float) -> Fraction:
    """0.7 is seven tenths: what a user writes, not what the machine stores."""
    return Fraction(str(share))


def similar_pairs(
    texts: Sequence[str], share: float, leave_out: Callable[[int, int], bool] = lambda first, second: False
) -> list[Pair]:
    """Every pair of texts whose Jaccard index is `share` (0 < share <= 1) or more, ordered by `second`, then `first`.

    Exact, by prefix filtering (Chaudhuri et al. 2006; Xiao et al., PPJoin, 2008): two sets that reach the share have a gram in
    common among the rarest |x| - ceil(share |x|) + 1 of each, so only these are looked up. `leave_out` names pairs of no interest.
    """
    least = exact(share)
    counts = Counter(gram for text in texts for gram in grams(text))
    rank = {gram: place for place, gram in enumerate(sorted(counts, key=lambda gram: (counts[gram], gram)))}
    sets: list[list[int]] = [sorted(rank[gram] for gram in grams(text)) for text in texts]
    members: list[frozenset[int]] = [frozenset(row) for row in sets]
    postings: defaultdict[int, list[int]] = defaultdict(list)
    pairs = []
    for second, row in enumerate(sets):
        size = len(row)
        prefix = row[: size - _ceil(least * size) + 1]
        candidates: set[int] = set()
        for gram in prefix:
            candidates.update(postings[gram])
            postings[gram].append(second)
        for first in sorted(candidates):
            other = len(sets[first])
            if min(size, other) < least * max(size, other) or leave_out(first, second):
                continue
            shared = len(members[first] & members[second])
            pair = Pair(first, second, shared, size + other - shared)
            if pair.reaches(least):
                pairs.append(pair)
    return pairs


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


class Families:
    """Union of family names. The name of a joined family is the first of its names in order, whatever the order of joining."""

    def __init__(self) -> None:
        self.above: dict[str, str] = {}

    def name(self, family: str) -> str:
        root = family
        while (above := self.above.get(root, root)) != root:
            root = above
        while family != root:
            self.above[family], family = root, self.above[family]
        return root

    def join(self, one: str, other: str) -> None:
        low, high = sorted((self.name(one), self.name(other)))
        if low != high:
            self.above[high] = low
