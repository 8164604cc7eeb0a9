"""Near-duplicates: the join finds every pair that all pairs compared find; what is masked, what is a unit."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations

import pytest

from specgraft.records import Prompt
from specgraft.regen.near_duplicates import Families, asked_texts, exact, frame, gram_sets, similar_pairs, units


def prompt(*messages: tuple[str, str], language: str = "en", tools: tuple[dict, ...] = ()) -> Prompt:
    return Prompt("p", "f", language, "chat", tuple({"role": role, "content": text} for role, text in messages), tools)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is 1,250.5 + 3?", ["what", "is", "0", "0"]),
        ("snake_case x12", ["snake", "case", "x", "0"]),
        ("안녕 world 하세요", ["안", "녕", "world", "하", "세", "요"]),
        ("東京タワーは333m", ["東", "京", "タ", "ワ", "ー", "は", "0", "m"]),
        ("ﾀﾜｰ ＡＢＣ Ｆｕ", ["タ", "ワ", "ー", "abc", "fu"]),
        ("über ΣΑΣ ß", ["über", "σασ", "ss"]),
        ("?!…", []),
    ],
)
def test_units(text: str, expected: list[str]) -> None:
    assert units(text) == expected


def test_numbers_are_masked_only_where_asked() -> None:
    assert units("2 and 10", mask_numbers=False) == ["2", "and", "10"]


def naive(one: str, other: str) -> Fraction:
    def grams(text: str) -> set[str]:
        found = text.lower().split()
        return {" ".join(found[n : n + 3]) for n in range(len(found) - 2)} or {" ".join(found)}

    left, right = grams(one), grams(other)
    return Fraction(len(left & right), len(left | right))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.6, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("vocabulary", [2, 6, 40])
def test_the_join_finds_what_all_pairs_find(share: float, vocabulary: int) -> None:
    draw = random.Random(f"{share}{vocabulary}")
    texts = []
    for _ in range(60):
        if texts and draw.random() < 0.5:  # a variant of an earlier one
            words = draw.choice(texts).split()
            words[draw.randrange(len(words))] = f"w{chr(97 + draw.randrange(vocabulary) % 26)}"
        else:
            words = [f"w{chr(97 + draw.randrange(vocabulary) % 26)}" for _ in range(draw.randrange(1, 14))]
        texts.append(" ".join(words))
    expected = {(i, j): naive(texts[i], texts[j]) for i, j in combinations(range(60), 2) if naive(texts[i], texts[j]) >= exact(share)}
    found = similar_pairs(gram_sets(texts), share)
    assert {(pair.first, pair.second): Fraction(pair.shared, pair.union) for pair in found} == expected
    assert [(pair.second, pair.first) for pair in found] == sorted((pair.second, pair.first) for pair in found)


def test_seven_tenths_are_seven_tenths() -> None:
    """7 of 10 grams are shared: 0.7 as a float is a little less, 7 / 10 a little more or less, neither decides."""
    assert exact(0.7) == Fraction(7, 10)
    sets = [frozenset(range(10)), frozenset(range(7))]
    assert [pair[2:] for pair in similar_pairs(sets, 0.7)] == [(7, 10)]
    assert similar_pairs([frozenset(range(1000)), frozenset(range(699))], 0.7) == []


def test_pairs_may_be_left_out() -> None:
    sets = gram_sets(["a b c d"] * 3)
    assert [pair[:2] for pair in similar_pairs(sets, 0.5, lambda first, second: first == 0)] == [(1, 2)]


def test_texts_without_words_are_their_own() -> None:
    empty, same, other = gram_sets(["?!", " ?! ", "…"])
    assert empty == same != other


def test_recorded_answers_and_system_texts_are_not_what_is_asked() -> None:
    asked = prompt(("system", "s"), ("user", "x"), ("assistant", "a"), ("tool", "7"), ("user", "y"), ("assistant", "b"))
    assert asked_texts(asked) == ["x", "7", "y"]


def test_a_frame_is_language_system_text_and_tools() -> None:
    base = prompt(("system", "Be brief, 2024-01-02."), ("user", "x"))
    assert frame(base) == frame(prompt(("system", "be brief  2025-11-30"), ("user", "y")))
    for other in (
        prompt(("system", "Be long, 2024-01-02."), ("user", "x")),
        prompt(("user", "x")),
        prompt(("system", "Be brief, 2024-01-02."), ("user", "x"), language="ko"),
        prompt(("system", "Be brief, 2024-01-02."), ("user", "x"), tools=({"name": "f"},)),
    ):
        assert frame(base) != frame(other)


def test_joined_families_have_one_name_whatever_the_order() -> None:
    edges = [("d", "c"), ("b", "a"), ("c", "b"), ("x", "y")]
    for order in (edges, edges[::-1], [edges[2], edges[0], edges[3], edges[1]]):
        families = Families()
        for one, other in order:
            families.join(one, other)
        assert [families.name(name) for name in "abcdxyz"] == ["a", "a", "a", "a", "x", "x", "z"]
