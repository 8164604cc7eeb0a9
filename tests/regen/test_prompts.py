"""The prompts of `regen`: the built-in set, the JSONL reader and the split."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from specgraft.records import Prompt
from specgraft.regen.builtin.particles import with_particle
from specgraft.regen.builtin.registry import DOMAINS, LANGUAGES
from specgraft.regen.prompts import builtin_counts, builtin_prompts, read_prompts, split_of

CELLS = [(language, domain) for language in LANGUAGES for domain in DOMAINS]


@lru_cache
def _cell(language: str, domain: str) -> list[Prompt]:
    return builtin_prompts(languages={language: 1}, domains={domain: 1})


@lru_cache
def _everything() -> list[Prompt]:
    return [prompt for cell in CELLS for prompt in _cell(*cell)]


def _text(prompt: Prompt) -> tuple[str, ...]:
    return tuple(message["content"] for message in prompt.messages)


def test_prompts_and_ids_are_distinct() -> None:
    prompts = _everything()
    assert len({_text(prompt) for prompt in prompts}) == len(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_the_set_is_large_enough() -> None:
    counts = builtin_counts()
    per_language = {name: sum(counts[f"{name}-{domain}"] for domain in DOMAINS) for name in LANGUAGES}
    assert sum(counts.values()) >= 24_000
    assert per_language["en"] >= 12_000
    assert min(per_language["ko"], per_language["ja"]) >= 4_000
    assert len(builtin_prompts()) >= 24_000  # with the default weights


def test_messages_are_well_formed() -> None:
    for prompt in _everything():
        roles = [message["role"] for message in prompt.messages]
        assert roles[roles[0] == "system" :: 2] == ["user"] * len(roles[roles[0] == "system" :: 2])
        assert roles[-1] == "user"
        assert all(text.strip() for text in _text(prompt))
        assert bool(prompt.tools) == (prompt.domain == "tool")
        assert prompt.id.startswith(f"{prompt.language}-{prompt.domain}-")
        assert prompt.id.startswith(prompt.family + "-")


def test_no_slot_is_left_open() -> None:
    slot = re.compile(r"\{[a-z][a-z0-9_]*(\.\w+)?(:\S+)?\}")
    for prompt in _everything():
        for text in _text(prompt):
            prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
            assert not slot.search(prose), (prompt.id, text)


@pytest.mark.parametrize("cell", CELLS)
def test_prompts_differ_in_more_than_their_numbers(cell: tuple[str, str]) -> None:
    prompts = _cell(*cell)
    wordings = {re.sub(r"[\d.,]+", "0", prompt.messages[-1]["content"]) for prompt in prompts}
    assert len(wordings) > (0.45 if cell[1] == "math" else 0.9) * len(prompts)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_has_families_on_both_sides_of_the_split(cell: tuple[str, str]) -> None:
    families = {prompt.family for prompt in _cell(*cell)}
    assert len(families) >= (25 if cell in [("en", "chat"), ("en", "code"), ("en", "math")] else 12)
    assert {split_of(family, 0.1) for family in families} == {"train", "heldout"}


def test_the_split_goes_by_family_alone() -> None:
    sides: dict[str, set[str]] = {}
    for prompt in builtin_prompts(3000):
        sides.setdefault(prompt.family, set()).add(split_of(prompt.family, 0.1))
    assert all(len(side) == 1 for side in sides.values())
    assert (split_of("en-chat-explain", 0.0), split_of("en-chat-explain", 1.0)) == ("train", "heldout")
    assert split_of("family-0", 0.1) == split_of("family-0", 0.1)
    share = sum(split_of(f"family-{number}", 0.1) == "heldout" for number in range(2000)) / 2000
    assert 0.08 < share < 0.12
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            split_of("x", bad)


def test_raising_the_share_only_moves_families_to_heldout() -> None:
    families = [f"family-{number}" for number in range(300)]
    small = {family for family in families if split_of(family, 0.1) == "heldout"}
    assert small < {family for family in families if split_of(family, 0.3) == "heldout"}


def test_the_set_is_pinned() -> None:
    ids = [prompt.id for prompt in builtin_prompts(48)]
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] == "83f3248fd7892488"


def test_another_process_gives_the_same_set() -> None:
    code = (
        "from specgraft.regen.prompts import builtin_prompts as b; print(*[p.id for p in b(30, domains={'tool': 1})])"
    )
    source = str(Path(__file__).parents[2] / "src")
    env = {"PYTHONPATH": source, "PYTHONHASHSEED": "77", "SYSTEMROOT": "C:\\Windows"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [prompt.id for prompt in builtin_prompts(30, domains={"tool": 1})]


def test_no_heavy_imports() -> None:
    code = "import sys, specgraft.regen.prompts; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "SYSTEMROOT": "C:\\Windows"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_default_weights_are_met() -> None:
    prompts = builtin_prompts(2000)
    assert len(prompts) == 2000
    assert Counter(prompt.language for prompt in prompts) == {"en": 1200, "ko": 400, "ja": 400}
    assert Counter(prompt.domain for prompt in prompts) == {"chat": 800, "code": 500, "math": 400, "tool": 300}


def test_largest_remainder() -> None:
    counts = Counter(prompt.language for prompt in builtin_prompts(10, languages={"en": 2, "ko": 1}))
    assert counts == {"en": 7, "ko": 3}
    assert len(builtin_prompts(101, languages={"en": 1, "ko": 1, "ja": 1})) == 101
    assert builtin_prompts(0) == []


def test_a_small_set_is_mixed_from_the_start() -> None:
    prompts = builtin_prompts(60)
    assert len({(prompt.language, prompt.domain) for prompt in prompts}) == 12
    assert len({prompt.family for prompt in prompts}) >= 50


@pytest.mark.parametrize(("small", "large"), [(10, 20), (100, 500), (997, 5003)])
def test_a_larger_set_holds_the_smaller_one(small: int, large: int) -> None:
    few, many = builtin_prompts(small), builtin_prompts(large)
    assert {prompt.id for prompt in few} <= {prompt.id for prompt in many}
    agree = sum(a.id == b.id for a, b in zip(few, many, strict=False))
    assert agree >= small - len(CELLS)  # rounding can move one prompt per cell


def test_the_seed_changes_the_choice_but_not_the_ids() -> None:
    first, second = builtin_prompts(300), builtin_prompts(300, seed=1)
    assert {prompt.id for prompt in first} != {prompt.id for prompt in second}
    known = {prompt.id: prompt for prompt in _everything()}
    assert all(known[prompt.id] == prompt for prompt in second)


def test_asking_for_too_much_names_the_cell() -> None:
    held = builtin_counts()["ko-code"]
    with pytest.raises(ValueError, match=rf"ko-code \(wanted {held + 1}, available {held}\)"):
        builtin_prompts(held + 1, languages={"ko": 1}, domains={"code": 1})
    assert len(builtin_prompts(held, languages={"ko": 1}, domains={"code": 1})) == held


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"languages": {"fr": 1}}, "language 'fr': choose from en, ko, ja"),
        ({"domains": {"law": 1}}, "domain 'law': choose from chat, code, math, tool"),
        ({"languages": {"en": -1}}, "weight of language 'en' is -1"),
        ({"languages": {"en": float("nan")}}, "weight of language 'en' is nan"),
        ({"languages": {"en": 0}}, "no language has a positive weight"),
        ({"count": -1}, "count is -1"),
    ],
)
def test_bad_arguments(arguments: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        builtin_prompts(**{"count": 10, **arguments})


@pytest.mark.parametrize(
    ("word", "form", "result"),
    [
        ("물", "은", "물은"),
        ("나무", "은", "나무는"),
        ("서울", "으로", "서울로"),
        ("부산", "으로", "부산으로"),
        ("책", "이라", "책이라"),
        ("16", "은", "16은"),
        ("12", "을", "12를"),
        ("300", "으로", "300으로"),
        ("1000", "이", "1000이"),
        ("2/3", "과", "2/3과"),
        ("SQL", "을", "SQL을"),
        ("25%", "을", "25%를"),
        ("티끌 모아 태산", "-이라", "이라"),
        ("3, 5, 8", "이에요", "3, 5, 8이에요"),
    ],
)
def test_korean_particles(word: str, form: str, result: str) -> None:
    assert with_particle(word, form) == result


def _write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def test_read_prompts(tmp_path: Path) -> None:
    full = {"id": "a", "family": "f", "language": "ko", "domain": "tool", "messages": [USER], "tools": [TOOL]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    chat = {"messages": [USER, call, {"role": "tool", "tool_call_id": "1", "content": "12:00"}], "extra": 1}
    path = _write(
        tmp_path / "p.jsonl", full, "", {"messages": [USER], "tools": json.dumps([TOOL])}, {"messages": [USER]}, chat
    )
    first, second, third, fourth = read_prompts(path)
    assert first == Prompt("a", "f", "ko", "tool", (USER,), (TOOL,))
    assert second.tools == (TOOL,)
    assert (third.language, third.domain, third.tools) == ("und", "chat", ())
    assert third.family == third.id
    assert third.id == read_prompts(_write(tmp_path / "q.jsonl", {"messages": [USER]}))[0].id
    assert len({first.id, second.id, third.id, fourth.id}) == 4
    assert fourth.messages[1]["tool_calls"] == call["tool_calls"]


def test_read_prompts_accepts_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"id": 7, "messages": [USER]}).encode() + b"\r\n\r\n")
    assert read_prompts(str(path))[0].id == "7"


def test_the_builtin_set_can_be_written_and_read(tmp_path: Path) -> None:
    prompts = builtin_prompts(200)
    assert read_prompts(_write(tmp_path / "p.jsonl", *(prompt.to_json() for prompt in prompts))) == prompts


IMAGE = {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'a'}", "bad JSON (Expecting property name enclosed in double quotes at column 2); write one JSON object"),
        ("[1]", "not a JSON object; write"),
        ({"text": "Hi"}, "no messages; give"),
        ({"messages": []}, "no messages; give"),
        ({"messages": ["Hi"]}, "messages[0] is not an object; give role and content"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, 'messages[0] has unknown role "bot"; use one of system,'),
        ({"messages": [{"content": "Hi"}]}, "messages[0] has unknown role null"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0] has int as content; give a string or null"),
        ({"messages": [IMAGE]}, "messages[0] holds image_url; remove images"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}, "join its text parts"),
        ({"messages": [{"role": "assistant", "content": "Hello"}, USER]}, "messages[0] opens with assistant; begin with the user"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "the last message has no content"),
        ({"messages": [{"role": "system", "content": "Hi"}]}, "last message is from system; end with the user turn"),
        ({"messages": [{"role": "user", "content": None}]}, "the last message has no content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [USER], "tools": "get_weather"}, "tools is a string that is not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools is not a list of objects"),
        ({"messages": [USER], "id": ""}, 'id is ""; give a non-empty string or leave it out'),
        ({"messages": [USER], "language": 3}, "language is 3; give a non-empty string"),
        ({"id": "first", "messages": [USER]}, "id 'first' is already on line 1; give every prompt its own id"),
        ({"messages": [{"role": "user", "content": "x"}], "id": "two\nlines"}, "holds a line break"),
        ({"messages": [{"role": "user", "content": "x"}], "family": "\ud800"}, "holds a line break or another unprintable"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: object, problem: str) -> None:
    path = _write(tmp_path / "p.jsonl", {"id": "first", "messages": [USER]}, "", line)
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"\xe9")
    for path, problem in [
        (tmp_path / "none.jsonl", "no such file; give the path of a JSONL file"),
        (tmp_path, "cannot be read"),
        (_write(tmp_path / "empty.jsonl"), "holds no prompts; write one"),
        (latin, "not UTF-8 at byte 0"),
    ]:
        with pytest.raises(ValueError, match=problem) as caught:
            read_prompts(path)
        assert str(caught.value).startswith(f"{path}: ")
