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
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from specgraft.records import Prompt

GRAM = 3
# Hangul, kana, Han, and the scripts of Thai, Lao, Burmese and Khmer
CHARACTERS = "ᄀ-ᇿ぀-ヿ㄰-㆏ㇰ-ㇿ㐀-䶿一-鿿가-힣豈-﫿\U00020000-\U000323af\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
UNIT = re.compile(rf"[{CHARACTERS}]|[^\W\d_{CHARACTERS}]+|\d+(?:[.,]\d+)*")


def units(text: str, mask_numbers: bool = True) -> list[str]:
    """Words, or characters in scripts as above, in lower case and Unicode form NFKC; punctuation left out."""
    found = UNIT.findall(unicodedata.normalize("NFKC", text).casefold())
    return ["0" if mask_numbers and unit[0].isdecimal() else unit for unit in found]


def asked_texts(prompt: Prompt) -> list[str]:
    """What a prompt asks: the user and tool turns. Recorded answers do not count, as regen writes them anew."""
    return [message.get("content") or "" for message in prompt.messages if message["role"] in ("user", "tool")]


def frame(prompt: Prompt) -> str:
    """What the same words are asked under: language, system text, tools. Prompts of different frames have different answers."""
    system = " ".join(m.get("content") or "" for m in prompt.messages if m["role"] in ("system", "developer"))
    tools = json.dumps(prompt.tools, ensure_ascii=False, sort_keys=True)
    return "\x1f".join([prompt.language, " ".join(units(system)), " ".join(units(tools))])


def gram_sets(texts: Iterable[str]) -> list[frozenset[int]]:
    """Of each text the set of three units in a row, as numbers that are the same for the same gram.

    A text of fewer units is one gram, one without any unit is its own.
    """
    numbers: dict[str, int] = {}
    sets = []
    for text in texts:
        found = units(text)
        if len(found) < GRAM:
            grams = [" ".join(found) or f"\x1f{text.strip()}"]
        else:
            grams = [" ".join(found[place : place + GRAM]) for place in range(len(found) - GRAM + 1)]
        sets.append(frozenset(numbers.setdefault(gram, len(numbers)) for gram in grams))
    return sets


class Pair(NamedTuple):
    """Two sets by their places, `first` < `second`, and what they share."""

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
    sets: Sequence[frozenset[int]], share: float, leave_out: Callable[[int, int], bool] = lambda first, second: False
) -> list[Pair]:
    """Every pair of sets whose Jaccard index is `share` (0 < share <= 1) or more, ordered by `second`, then `first`.

    Exact, by prefix filtering (Chaudhuri et al. 2006; Xiao et al., PPJoin, 2008): two sets that reach the share have a gram in
    common among the rarest |x| - ceil(share |x|) + 1 of each, so only these are looked up. `leave_out` names pairs of no interest.
    """
    least = exact(share)
    counts = Counter(gram for members in sets for gram in members)
    postings: defaultdict[int, list[int]] = defaultdict(list)
    pairs = []
    for second, members in enumerate(sets):
        size = len(members)
        rarest = sorted(members, key=lambda gram: (counts[gram], gram))[: size - ceil(least * size) + 1]
        candidates: set[int] = set()
        for gram in rarest:
            candidates.update(postings[gram])
            postings[gram].append(second)
        for first in sorted(candidates):
            other = len(sets[first])
            if min(size, other) < least * max(size, other) or leave_out(first, second):
                continue
            shared = len(members & sets[first])
            pair = Pair(first, second, shared, size + other - shared)
            if pair.reaches(least):
                pairs.append(pair)
    return pairs


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
