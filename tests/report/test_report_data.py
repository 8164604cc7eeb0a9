"""The data section: mix wanted against got, lengths, what was left out, conversations with their masks; and any half of it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from specgraft.report.stage import report
from specgraft.run_dir import RunDir, read_json, write_json


def section(run: RunDir) -> str:
    page = report(run).read_text(encoding="utf-8")
    assert "could not be shown" not in page
    found = re.search(r'<section id="data".*?</section>', page, re.DOTALL)
    assert found is not None
    return found.group()


def test_mix_lengths_and_what_was_left_out(shared_run: RunDir) -> None:
    text = section(shared_run)
    assert text.count("<svg") == 2
    assert "en chat 80 of 80" in text and "ja tool 72 of 80" in text and "(8 missing)" in text
    assert "0-500 characters 236 of 240" in text
    assert "3 quotas fell short" in text  # ja tool, and both lengths
    assert "0-127 100, 44 % supervised" in text
    assert "98,431 supervised tokens of 164,050 (60 %)" in text and "640 answers, 60 prompts with several" in text
    for said in ("a:7", "messages[0] holds image_url", "81: compose an engaging", "91 % of a/11"):
        assert said in text


def test_conversations_are_coloured_by_mask_and_escaped(shared_run: RunDir) -> None:
    text = section(shared_run)
    assert '<span class="learn">&lt;script&gt;alert(2)&lt;/script&gt;&lt;|im_end|&gt;</span>' in text and "<script>" not in text
    assert '<span class="learn">네, 다시&lt;|im_end|&gt;</span></div>' in text
    assert "Write &lt;b&gt;bold&lt;/b&gt;" in text and 'lang="ja"' in text
    assert text.count("<article>") == 2 and text.count('class="learn"') == 4  # and the legend's


def test_without_a_mix_the_answered_cells_are_shown(full_run: RunDir) -> None:
    (full_run.prompts / "mix.json").unlink()
    text = section(full_run)
    assert "en chat 115" in text and "asked for" not in text


def test_before_anything_is_answered(full_run: RunDir) -> None:
    full_run.data.unlink()
    assert "none are answered yet" in section(full_run)
    (full_run.prompts / "mix.json").unlink()
    assert "No prompts are drawn" in section(full_run)


def test_a_run_of_an_older_version(full_run: RunDir) -> None:
    keys = ("conversations", "tokens", "cut", "by_language", "by_domain", "splits")
    write_json(full_run.data, {key: read_json(full_run.data)[key] for key in keys})
    (full_run.prompts / "mix.json").unlink()
    assert "580 conversations, 98,431 supervised tokens" in section(full_run)


@pytest.mark.parametrize("value", [None, "text", -1, [None], {"a": None}, [{"text": 3, "rows": "x"}]])
def test_any_part_may_be_anything(full_run: RunDir, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specgraft.report import data, data_pictures
    from specgraft.report.read import found

    for name in ("quotas", "lengths"):
        monkeypatch.setattr(data_pictures, name, lambda *arguments: "<svg></svg>")
    files: dict[Path, tuple[tuple[str, ...], ...]] = {
        full_run.data: (("cells",), ("lengths",), ("examples",), ("end_reasons",), ("tokens",), ("turns",), ("answers",)),
        full_run.prompts / "mix.json": (
            ("report",), ("report", "splits"), ("report", "splits", "train"), ("report", "sources"), ("report", "rejected"),
            ("report", "contaminated"), ("report", "near_duplicates"),
        ),
    }  # fmt: skip
    for path, places in files.items():
        whole = read_json(path)
        for keys in places:
            changed = copy.deepcopy(whole)
            node = changed
            for key in keys[:-1]:
                node = node[key]
            node[keys[-1]] = value
            write_json(path, changed)
            assert data.data(found(full_run)).title == "Data"
        write_json(path, whole)
