"""The whole page: complete, self-contained, escaped, and unbreakable."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from specgraft.report import onpolicy, pictures
from specgraft.report.stage import ORDER, report
from specgraft.run_dir import RunDir, read_json, write_json

FILES = ("config", "summary", "gates", "metrics", "evaluation", "timing", "data")
BROKEN = "could not be shown"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Collects ids, attributes and visible text, and checks that tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "srcset", "action", "xlink:href"):
                self.links.append(value or "")


def page_of(run: RunDir) -> str:
    path = report(run)
    assert path == run.report
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full_page(shared_run: RunDir) -> str:
    return page_of(shared_run)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but not laid out and written, which is most of a page's second."""

    def drawn(name: str, alt: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
        draw(Figure())
        return f"<svg><title>{escape(alt)}</title></svg>"

    monkeypatch.setattr(pictures, "drawn", drawn)


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)
    assert found is not None
    return found.group()


def test_every_section_is_there_in_order(full_page: str) -> None:
    page = full_page
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [title for title, *_ in ORDER if title not in (onpolicy.TITLE, "In the engine")]  # of other runs
    assert BROKEN not in page and "missing-part" not in page.partition("<main>")[2]


def test_pictures(full_page: str) -> None:
    page = full_page
    counts = {name: section(page, name).count("<svg") for name in re.findall(r'<section id="([^"]+)"', page)}
    drawn = {"data": 2, "losses": 1, "accept-curve": 1, "groups": 2, "positions": 1, "confidence": 1, "steps": 1}
    assert {name: n for name, n in counts.items() if n} == drawn
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        tree = ElementTree.fromstring(svg)  # well-formed
        assert tree.get("role") == "img" and len(tree.get("aria-label") or "") > 30
        assert "<text" in svg and "#0a0b" not in svg  # text is text; every colour is one of the page's


def test_self_contained(full_page: str) -> None:
    page = full_page
    assert re.findall(r"https?:|//cdn|@import|<link|<script|<iframe|url\((?!#)", page) == []
    found = Reader(page)
    assert found.links and all(link.startswith("#") for link in found.links)
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert [name for name, n in Counter(found.ids).items() if n > 1] == []
    assert '<meta charset="utf-8">' in page


def test_generations_are_escaped_and_coloured(full_page: str) -> None:
    page = section(full_page, "examples")
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<mark>&lt;b&gt;bold&lt;/b&gt;</mark>" in page
    assert '<span class="prefill">경복궁</span><mark>에서 시작해 </mark>북촌' in page
    assert 'lang="ja"' in page and "りんごが3個" in page
    assert page.count("<article>") == 3


def test_hostile_text_everywhere(full_run: RunDir) -> None:
    evil = '<img src=x onerror="alert(1)">&$x_1$ \x00\x1b\ud800'
    found = read_json(full_run.evaluation)
    groups = {evil: {"accept_length": 1.5, "requests": 3}, "한국어": {"accept_length": 1.4, "requests": 2}}
    for key in ("t0", "t1"):
        found[key] |= {"by_domain": groups, "by_language": groups}
    found["examples"][0] |= {"prompt": evil, "prompt_id": evil, "domain": evil, "language": evil}
    found["examples"][0]["pieces"] = [{"text": evil, "kind": evil}, {"text": evil, "kind": "draft"}]
    found["speed"]["dtype"] = evil
    full_run.evaluation.write_text(json.dumps(found), encoding="utf-8")  # \ud800 travels as an escape
    write_json(full_run.timing, {"<b>": 3.0})
    write_json(full_run.gates, {"gates": [{"name": "<i>gate", "passed": True, "detail": "<u>detail"}]})
    page = page_of(full_run)
    read = Reader(page)
    assert BROKEN not in page
    assert {"img", "b", "i", "u", "script"} & set(read.tags) == {"b"} and "<b>&" not in page
    assert "\x00" not in page and "\x1b" not in page and "\ud800" not in page


@pytest.mark.usefixtures("quick")
def test_headline(full_run: RunDir) -> None:
    text = " ".join(Reader(section(page_of(full_run), "headline")).text.split())
    for said in (
        "Accept length, T=0 1.72 pooled 1.70",
        "at most 8; mean of 100 held-out requests, pooled over rounds beside it; bonus included, G=7, T=0, float32",
        "Speed against no draft, T=0 0.76× slower than no draft",
        "Break-even accept length at the measured step, T=0 2.21 does not pay: pooled 1.70",
        "a step may take 40.0 ms",
        "identical up to ties 0 mismatches, 2 ties",
        "18.4 min",
    ):
        assert said in text


@pytest.mark.usefixtures("quick")
def test_faster_and_identical(full_run: RunDir) -> None:
    found = read_json(full_run.evaluation)
    found["speed"]["t0"] |= {"speedup": 1.31, "step_ms": 28.0}
    found["t0"]["lossless"]["ties"] = 0
    write_json(full_run.evaluation, found)
    text = " ".join(Reader(section(page_of(full_run), "headline")).text.split())
    assert "1.31× faster than no draft" in text and "pays: pooled 1.70" in text and "identical 0 mismatches" in text


@pytest.mark.usefixtures("quick")
def test_text_that_differs_is_said(full_run: RunDir) -> None:
    found = read_json(full_run.evaluation)
    found["t0"]["lossless"]["mismatches"] = 3
    write_json(full_run.evaluation, found)
    assert "differs 3 mismatches" in " ".join(Reader(section(page_of(full_run), "headline")).text.split())


@pytest.mark.usefixtures("quick")
def test_speed_and_break_even_may_disagree(full_run: RunDir) -> None:
    found = read_json(full_run.evaluation)
    found["speed"]["t0"] |= {"speedup": 1.04}
    write_json(full_run.evaluation, found)
    assert "The timed prompts say the opposite" in page_of(full_run)


@pytest.mark.usefixtures("quick")
def test_gates(full_run: RunDir) -> None:
    text = " ".join(Reader(section(page_of(full_run), "gates")).text.split())
    assert "agreement ✗ FAILED predicted 1.71, pooled 1.62" in text
    assert "engine agreement – not run" in text
    assert "distribution identity ✓ passed" in text and "export ✓ passed" in text


def test_empty_run(tmp_path: Path) -> None:
    page = page_of(RunDir(tmp_path / "fresh").create())
    Reader(page)
    assert BROKEN not in page and "<svg" not in page
    assert page.count("not run</span>") == 8
    for said in ("train stage has not begun", "evaluate stage has not finished", "config.json is not there", "fresh"):
        assert said in page


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("quick")
def test_one_file_missing(full_run: RunDir, name: str) -> None:
    getattr(full_run, name).unlink()
    page = page_of(full_run)
    Reader(page)
    assert BROKEN not in page


@pytest.mark.parametrize("text", ["", "{", "[]", '{"gates": 4}'])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("quick")
def test_one_file_damaged(full_run: RunDir, name: str, text: str) -> None:
    path = getattr(full_run, name)
    path.write_text(text, encoding="utf-8")
    page = page_of(full_run)
    Reader(page)
    if name != "metrics" and text in ("", "{"):
        assert f"{path.name}: damaged" in page


@pytest.mark.parametrize("value", [None, "text", -1, [None], {"a": None}, float("nan")])
@pytest.mark.usefixtures("quick")
def test_any_part_of_the_evaluation_may_be_anything(full_run: RunDir, value: Any) -> None:
    full_run.metrics.unlink()  # the curves are not what is tried here
    whole = read_json(full_run.evaluation)
    for keys in (
        ["settings"], ["t0"], ["t1"], ["confidence"], ["speed"], ["examples"], ["t0", "accept_length"],
        ["t0", "survival"], ["t0", "conditional"], ["t0", "by_domain"], ["t0", "lossless"],
        ["t0", "accept_length_pooled"],
        ["confidence", "bins"], ["confidence", "ece_by_slot"], ["speed", "t0"], ["speed", "t0", "step_ms"],
        ["speed", "t0", "draft_ms"], ["speed", "t0", "tokens_per_second"],
    ):  # fmt: skip
        changed = copy.deepcopy(whole)
        node = changed
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        write_json(full_run.evaluation, changed)
        Reader(page_of(full_run))


def test_a_run_killed_while_training(full_run: RunDir) -> None:
    rows = full_run.metrics.read_text(encoding="utf-8").splitlines()
    full_run.metrics.write_text("\n".join(rows[:30]) + '\n{"kind": "tra', encoding="utf-8")
    for name in ("evaluation", "summary", "gates"):
        getattr(full_run, name).unlink()
    page = page_of(full_run)
    assert "30 of 300 steps" in page and "No validation has been logged yet" in page and BROKEN not in page


@pytest.mark.usefixtures("quick")
def test_loss_that_is_no_number(full_run: RunDir) -> None:
    rows = [json.loads(line) for line in full_run.metrics.read_text(encoding="utf-8").splitlines()]
    rows[5]["loss"] = float("nan")
    full_run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert "1 logged steps have no finite loss" in page_of(full_run)


@pytest.mark.usefixtures("quick")
def test_a_failure_that_was_allowed(full_run: RunDir) -> None:
    write_json(full_run.gates, {"gates": [{"name": "overfit", "passed": False, "detail": "1.2 of 8", "allowed": True}]})
    assert "overfit ✗ FAILED, allowed 1.2 of 8" in " ".join(Reader(section(page_of(full_run), "gates")).text.split())


def test_without_matplotlib(full_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = page_of(full_run)
    assert page.count("matplotlib is not installed: pip install") == 7 and "<svg" not in page
    assert "1.72" in section(page, "headline")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such run folder"):
        report(RunDir(tmp_path / "absent"))


def test_report_loads_no_torch(full_run: RunDir) -> None:
    code = (
        "import sys, pathlib; from specgraft.report.stage import report; from specgraft.run_dir import RunDir\n"
        "loaded = [m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules]\n"
        "report(RunDir(pathlib.Path(sys.argv[1])))\n"
        "print(loaded, 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(full_run.root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False False"
