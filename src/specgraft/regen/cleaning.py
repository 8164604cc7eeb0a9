"""What is taken out of a mix before it is drawn, and which prompts are one family."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from specgraft.config import PromptsSection
from specgraft.records import Prompt
from specgraft.regen.contamination import Hit, compared, read_suites
from specgraft.regen.near_duplicates import Families, Pair, asked_texts, exact, frame, gram_sets, similar_pairs


@dataclass(frozen=True)
class Cleaned:
    """What may be drawn."""

    prompts: list[Prompt]  # `family` is the name of the joined family
    contaminated: set[str]  # ids that share a run with a suite; removed or only reported, as the run file says
    duplicates: set[str]  # ids taken out for another that is kept
    report: dict[str, Any]  # suites, contaminated, near_duplicates, joined


def clean(part: PromptsSection, prompts: Sequence[Prompt]) -> Cleaned:
    """Contaminated prompts out (or refused, or reported), then near-duplicates, the first of each is kept; then families joined.

    Near-duplicates of the same language, system text and tools are removed; those that differ in one of these are asked something else,
    and stay, in one family. A prompt that was removed still joins the families of what it resembles.
    """
    suites = read_suites(part.suites, part.contamination_words)
    hits = {prompt.id: hit for prompt in prompts if (hit := suites.hit(compared(prompt)))} if part.suites else {}
    if hits and part.contamination == "stop":
        name, hit = next(iter(hits.items()))
        raise ValueError(
            f"{len(hits)} prompts share text with a suite; the first, {name}, with {hit.suite} {hit.item} ({hit.run!r}): remove them, or "
            'set prompts.contamination="remove"'
        )
    kept = [prompt for prompt in prompts if part.contamination != "remove" or prompt.id not in hits]
    pairs = _pairs(part, kept)
    removed = _removed(part, kept, pairs)
    families = Families()
    for pair in pairs:
        families.join(kept[pair.first].family, kept[pair.second].family)
    left = [
        dataclasses.replace(prompt, family=families.name(prompt.family)) for place, prompt in enumerate(kept) if place not in removed
    ]
    report = {
        "suites": suites.summary,
        "contamination": part.contamination,
        "contaminated": [_hit_report(name, hit) for name, hit in hits.items()],
        "near_duplicates": [
            {"id": kept[place].id, "kept": kept[pair.first].id, "similarity": round(pair.shared / pair.union, 4)}
            for place, pair in removed.items()
        ],
        "joined": _joined(families, kept),
    }
    return Cleaned(left, set(hits), {kept[place].id for place in removed}, report)


def _hit_report(name: str, hit: Hit) -> dict[str, str]:
    return {"id": name, "suite": hit.suite, "suite_id": hit.item, "ngram": hit.run}


def _pairs(part: PromptsSection, prompts: Sequence[Prompt]) -> list[Pair]:
    """Pairs that matter: near-duplicates, and what makes one family of several names.

    Of prompts that are equal in every respect only the first is compared with others: a thousand copies are a thousand pairs.
    """
    shares = [share for share in (part.near_duplicates, part.same_family) if share > 0]
    if not shares:
        return []
    sets = gram_sets("\n".join(asked_texts(prompt)) for prompt in prompts)
    first_of: dict[tuple[frozenset[int], str], int] = {}
    equal, places = [], []
    for place, prompt in enumerate(prompts):
        first = first_of.setdefault((sets[place], frame(prompt) if part.near_duplicates else ""), place)
        if first == place:
            places.append(place)
        else:
            equal.append(Pair(first, place, len(sets[place]), len(sets[place])))

    def settled(first: int, second: int) -> bool:
        """Without removal a pair matters only where it joins families."""
        return part.near_duplicates == 0 and prompts[places[first]].family == prompts[places[second]].family

    found = similar_pairs([sets[place] for place in places], min(shares), settled)
    pairs = [pair._replace(first=places[pair.first], second=places[pair.second]) for pair in found] + equal
    return sorted(pairs, key=lambda pair: (pair.second, pair.first))


def _removed(part: PromptsSection, prompts: Sequence[Prompt], pairs: Sequence[Pair]) -> dict[int, Pair]:
    """Places of prompts to take out, each with the most similar one that is kept, the first of equals."""
    removed: dict[int, Pair] = {}
    if part.near_duplicates == 0:
        return removed
    least = exact(part.near_duplicates)
    framed = cache(lambda place: frame(prompts[place]))
    for pair in pairs:  # ordered by `second`: whether `first` stays is known by then
        if not pair.reaches(least) or framed(pair.first) != framed(pair.second):
            continue
        if pair.first in removed:
            if pair.shared < pair.union:
                continue
            pair = removed[pair.first]._replace(second=pair.second)  # a copy of what was taken out goes with it
        best = removed.get(pair.second)
        if best is None or Fraction(pair.shared, pair.union) > Fraction(best.shared, best.union):
            removed[pair.second] = pair
    return removed


def _joined(families: Families, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Families that were several names."""
    names: dict[str, set[str]] = {}
    for prompt in prompts:
        names.setdefault(families.name(prompt.family), set()).add(prompt.family)
    return [{"family": name, "of": sorted(found)} for name, found in sorted(names.items()) if len(found) > 1]
