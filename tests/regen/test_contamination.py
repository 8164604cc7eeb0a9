"""Contamination: runs of words shared with a suite; the suite's own wording is no item."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgraft.regen.contamination import Hit, compared, read_suites
from specgraft.regen.schema import parse_record

QUESTION = "a train leaves the station at nine and travels sixty miles before it stops twice for water"


def suite(tmp_path: Path, *rows: dict, name: str = "suite") -> str:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def test_a_run_of_words_is_found_wherever_it_stands(tmp_path: Path) -> None:
    suites = read_suites([suite(tmp_path, {"id": "q1", "turns": ["Hello there.", QUESTION]})], 13)
    words = QUESTION.split()
    found = suites.hit(["Nothing here", f"Please answer: {' '.join(words[2:16]).upper()}!"])
    assert found == Hit("suite", "q1", " ".join(words[2:15]))
    assert suites.hit([f"Please answer: {' '.join(words[2:14])} or not"]) is None  # twelve words
    assert suites.hit([" ".join(words[2:8]), " ".join(words[8:16])]) is None  # a run does not go over turns
    assert suites.summary == [{"path": str(tmp_path / "suite.jsonl"), "items": 1, "runs": 6, "wording": 0}]


def test_numbers_count_as_they_are(tmp_path: Path) -> None:
    suites = read_suites([suite(tmp_path, {"id": "q", "prompt": "1 2 3 4 5 6"})], 4)
    assert suites.hit(["9 8 7 6 5 4"]) is None
    assert suites.hit(["0 2 3 4 5"]) is not None


def test_characters_count_in_korean_and_japanese(tmp_path: Path) -> None:
    suites = read_suites([suite(tmp_path, {"id": "ko", "prompt": "대한민국의 수도는 어디인지 알려 주세요"}, {"id": "ja", "prompt": "日本の首都はどこですか教えてください"})], 8)
    assert suites.hit(["그럼 대한민국의 수도는 어디인지 말해 봐"]) == Hit("suite", "ko", "대 한 민 국 의 수 도 는")
    assert suites.hit(["日本の首都はどこかな"]) == Hit("suite", "ja", "日 本 の 首 都 は ど こ")
    assert suites.hit(["日本の首都は東京です"]) is None


def test_short_items_are_hits_as_a_whole(tmp_path: Path) -> None:
    rows = [{"id": "seven", "prompt": "name the largest lake in central europe"}, {"id": "two", "prompt": "Hello World"}]
    suites = read_suites([suite(tmp_path, *rows)], 13)
    assert suites.hit(["Please name the largest lake in Central Europe now"]) == Hit("suite", "seven", rows[0]["prompt"])
    assert suites.hit(["name the largest lake in central"]) is None
    assert suites.hit(["hello, world!"]) == Hit("suite", "two", "hello world")
    assert suites.hit(["print hello world in C"]) is None


def test_the_wording_of_a_suite_is_no_item(tmp_path: Path) -> None:
    frame = "please reason step by step and put your final answer within the box at the end"
    rows = [{"id": n, "prompt": f"{' '.join(f'{word}{chr(97 + n)}' for word in QUESTION.split())} {frame}"} for n in range(6)]
    suites = read_suites([suite(tmp_path, *rows)], 13)
    assert suites.hit([f"What is two plus two? {frame}"]) is None
    assert suites.hit([rows[3]["prompt"]]).item == "3"
    assert suites.summary[0]["wording"] == len(frame.split()) - 12
    few = read_suites([suite(tmp_path, *rows[:4], name="few")], 13)  # in four items it may as well be an item's text
    assert few.hit([f"What is two plus two? {frame}"]) is not None


def test_a_suite_with_a_bad_row_is_refused(tmp_path: Path) -> None:
    path = suite(tmp_path, {"id": "q", "prompt": "x"}, {"text": "y"})
    with pytest.raises(ValueError, match=r"suite.jsonl:2: no messages; give"):
        read_suites([path], 13)


def test_of_an_agents_history_the_task_counts(tmp_path: Path) -> None:
    def history(task: str, printed: str, domain: str) -> dict:
        texts = (("user", task), ("assistant", "ls"), ("user", printed), ("assistant", "done"))
        return {"id": domain, "domain": domain, "messages": [{"role": role, "content": text} for role, text in texts]}

    suites = read_suites([suite(tmp_path, history(QUESTION, f"prints {QUESTION[::-1]}", "agent"))], 8)
    assert suites.hit(compared(parse_record(history(f"solve: {QUESTION}", "nothing", "agent")))) is not None
    for printed in (QUESTION, QUESTION[::-1]):
        assert suites.hit(compared(parse_record(history("list files", printed, "agent")))) is None
    assert suites.hit(compared(parse_record(history("list files", QUESTION, "chat")))) is not None
