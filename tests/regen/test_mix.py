"""The mix: quotas by language, domain, length and source; what is left out and why; one split; the same set everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specgraft.config import RunConfig
from specgraft.records import Conversation, Prompt, ids_digest
from specgraft.regen.answered import chosen_rows
from specgraft.regen.cli import plan
from specgraft.regen.mix import Mix, chosen_prompts, draw, plan_lines, refusal
from specgraft.regen.prompts import split_of
from specgraft.regen.quotas import apportion, in_turns, share_out
from specgraft.regen.stored import drawn_from
from specgraft.run_dir import RunDir, read_json

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def sentence(number: int, length: int = 12) -> str:
    """Words that no other number shares three in a row of."""
    seed = hashlib.sha256(str(number).encode()).digest()
    return " ".join(WORDS[(seed[n] * 7 + seed[n + 1]) % len(WORDS)] for n in range(length))


def row(number: int, language: str = "en", domain: str = "chat", **more: Any) -> dict[str, Any]:
    return {"id": str(number), "language": language, "domain": domain, "messages": [{"role": "user", "content": sentence(number)}], **more}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), "utf-8")
    return str(path)


def config_of(*sources: Any, train: int = 20, held_out: int = 4, seed: int = 0, **part: Any) -> RunConfig:
    listed = [{"path": source} if isinstance(source, str) else source for source in sources]
    section = {"sources": listed, "train": train, "held_out": held_out, "held_out_share": 0.3, "languages": {"en": 1}, "domains": {"chat": 1}}
    return RunConfig.model_validate({"run": {"seed": seed}, "prompts": {**section, **part}, "evaluate": {"prompts": 1}})


def everything(mix: Mix) -> str:
    rows = [[split, prompt.to_json()] for split, prompts in mix.prompts.items() for prompt in prompts]
    return hashlib.sha256(json.dumps([rows, mix.report], sort_keys=True, default=str).encode()).hexdigest()


# quotas


@pytest.mark.parametrize("count", [0, 1, 7, 100, 6_401])
def test_largest_remainder_is_within_one_of_every_quota(count: int) -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}
    seats = apportion(count, shares)
    assert sum(seats.values()) == count
    assert all(abs(seats[key] - count * share) < 1 for key, share in shares.items())


@pytest.mark.parametrize(
    ("count", "held", "expected"),
    [
        (10, {"a": 99, "b": 99, "c": 99}, {"a": 5, "b": 3, "c": 2}),
        (10, {"a": 1, "b": 99, "c": 99}, {"a": 1, "b": 5, "c": 4}),
        (10, {"a": 1, "b": 2, "c": 99}, {"a": 1, "b": 2, "c": 7}),
        (10, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        (10, {"c": 99}, {"a": 0, "b": 0, "c": 10}),
        (0, {"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 0, "c": 0}),
    ],
)
def test_a_source_that_runs_out_is_made_up_for(count: int, held: dict[str, int], expected: dict[str, int]) -> None:
    assert share_out(count, {"a": 5.0, "b": 3.0, "c": 2.0}, held) == expected


def test_families_take_turns(tmp_path: Path) -> None:
    rows = [row(n, family="large" if n < 30 else f"f{n}") for n in range(60)]
    large = split_of("large", 0.3)
    prompts = draw(config_of(write(tmp_path / "a.jsonl", rows), train=8, held_out=3)).prompts[large]
    assert len({p.family for p in prompts}) == len(prompts)  # though half of the file is one family
    everything = in_turns(prompts * 2, 0)
    assert everything[: len(prompts)] == in_turns(prompts, 0) != in_turns(prompts, 1)


@pytest.fixture
def wide(tmp_path: Path) -> list[str]:
    """Two files: two languages, two domains, short and long texts; 640 prompts."""
    rows = []
    for number in range(640):
        one = row(number, ("en", "ko")[number % 2], ("chat", "code")[number // 2 % 2])
        one["messages"][0]["content"] = sentence(number, (6, 30)[number // 4 % 2])
        rows.append(one)
    return [write(tmp_path / "one.jsonl", rows[:320]), write(tmp_path / "two.jsonl", rows[320:])]


WIDE = {"languages": {"en": 3, "ko": 1}, "domains": {"chat": 0.6, "code": 0.4}, "lengths": {"0-60": 0.25, "60-": 0.75}}


def test_quotas_by_language_domain_length_and_source(wide: list[str]) -> None:
    config = config_of(wide[0], {"path": wide[1], "weight": 3}, train=100, held_out=20, **WIDE)
    mix = draw(config)
    for split, count in (("train", 100), ("heldout", 20)):
        prompts, held = mix.prompts[split], mix.report["splits"][split]
        assert len(prompts) == held["got"] == held["wanted"] == count
        cells = Counter((p.language, p.domain, "60-" if len(p.messages[0]["content"]) >= 60 else "0-60") for p in prompts)
        for cell in held["cells"]:
            key = cell["language"], cell["domain"], cell["length"]
            exact = count * {"en": 0.75, "ko": 0.25}[key[0]] * {"chat": 0.6, "code": 0.4}[key[1]] * {"0-60": 0.25, "60-": 0.75}[key[2]]
            assert cell["wanted"] == cell["got"] == cells[key] and abs(cells[key] - exact) < 1
            given = Counter(p.id.split("/")[0] for p in prompts if (p.language, p.domain) == key[:2] and (len(p.messages[0]["content"]) >= 60) == (key[2] == "60-"))
            assert cell["sources"] == given
            assert cell["got"] <= cell["available"]
        first = Counter((p.language, p.domain) for p in prompts[: count // 2])
        assert first["en", "chat"] == pytest.approx(0.45 * count / 2, abs=2)  # mixed from the start
    sources = Counter(p.id.split("/")[0] for p in mix.prompts["train"])
    assert 70 <= sources["two"] <= 80
    assert draw(config_of(*wide, train=100, held_out=20, **WIDE)).prompts["train"] != mix.prompts["train"]


def test_a_quota_that_cannot_be_met_is_refused_or_reported(wide: list[str]) -> None:
    part = {"languages": {"en": 1, "ko": 1, "ja": 1}, "domains": {"chat": 1}, "train": 30, "held_out": 3}
    config = config_of(*wide, **part)
    with pytest.raises(ValueError, match=r"prompts.train=30: the sources cannot fill ja-chat \(wanted 10, available 0\): add sources") as caught:
        draw(config)
    assert "\n" not in str(caught.value)
    planned = draw(config, stop=False)
    assert refusal(config, planned.report) == str(caught.value)
    mix = draw(config_of(*wide, shortfall="report", **part))
    assert Counter(p.language for p in mix.prompts["train"]) == {"en": 10, "ko": 10}  # not made up for by the others
    assert mix.report["splits"]["train"] | {"cells": 0, "families": 0} == {"wanted": 30, "got": 20, "families": 0, "cells": 0}
    assert "10 missing" in "\n".join(plan_lines(mix.report))
    with pytest.raises(ValueError, match=r"prompts.held_out=300: .* raise prompts.held_out_share, add sources"):
        draw(config_of(*wide, train=20, held_out=300))
    with pytest.raises(ValueError, match=r"prompts.train=30: the sources"):  # nothing at all is no mix
        draw(config_of(*wide, shortfall="report", languages={"ja": 1}, train=30))
    with pytest.raises(ValueError, match=r"prompts.domains: no weight is positive"):
        draw(config_of(*wide, domains={"chat": 0}))


def test_what_no_weight_asks_for_is_counted(wide: list[str]) -> None:
    mix = draw(config_of(*wide, train=20, held_out=2, lengths={"0-60": 1}))
    assert sum(one["prompts"] for one in mix.report["not_asked"]) == 640 - 80
    assert {"language": "en", "domain": "chat", "length": "other", "prompts": 80} in mix.report["not_asked"]
    assert sum(source["not_asked"] for source in mix.report["sources"]) == 560
    for source in mix.report["sources"]:
        assert source["rows"] == sum(source[key] for key in ("rejected", "not_asked", "contaminated", "near_duplicates", "available"))


def test_r13_rows_of_two_sources_with_equal_ids_stay_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [row(n + start) | {"id": str(n)} for n in range(100)]) for name, start in (("A", 0), ("B", 500))]
    mix = draw(config_of(*paths, train=80, held_out=20))
    drawn = [prompt for prompts in mix.prompts.values() for prompt in prompts]
    assert len(drawn) == 100 == len({prompt.id for prompt in drawn})
    counts = Counter(prompt.id.split("/")[0] for prompt in drawn)
    assert all(35 <= counts[name] <= 65 for name in "AB")
    assert {one["name"]: one["train"] + one["heldout"] for one in mix.report["sources"]} == counts
    assert [one["rows"] for one in mix.report["sources"]] == [100, 100]


def test_r8_a_bad_row_is_listed_and_costs_no_other(tmp_path: Path) -> None:
    rows = [row(n) for n in range(40)]
    rows[7] = {"messages": [{"role": "my-model", "content": "x"}]}
    rows[9] = {"text": "x"}
    mix = draw(config_of(write(tmp_path / "a.jsonl", rows)))
    assert [(one["source"], one["line"]) for one in mix.report["rejected"]] == [("a", 8), ("a", 10)]
    assert mix.report["sources"][0] | {"train": 0, "heldout": 0} == {
        "name": "a", "path": str(tmp_path / "a.jsonl"), "rows": 40, "rejected": 2, "not_asked": 0, "contaminated": 0,
        "near_duplicates": 0, "available": 38, "train": 0, "heldout": 0,
    }  # fmt: skip
    text = "\n".join(plan_lines(mix.report))
    assert "rows rejected: 2" in text and 'a:8: messages[0] has unknown role "my-model"' in text and "a:10: no messages" in text


# near-duplicates and families


def variant(number: int, changed: int) -> str:
    """The sentence with its last `changed` words replaced."""
    words = sentence(number, 20).split()
    return " ".join(words[: 20 - changed] + [f"new{chr(97 + n)}" for n in range(changed)])


def test_near_duplicates_are_removed_and_the_first_is_kept(tmp_path: Path) -> None:
    rows = [row(n) for n in range(60)]
    rows[5]["messages"][0]["content"] = variant(1_000, 0)
    rows[8]["messages"][0]["content"] = variant(1_000, 2)  # 16 of 20 grams
    rows[9]["messages"][0]["content"] = variant(1_000, 2)  # a copy of what goes
    rows[11]["messages"][0]["content"] = variant(1_000, 4)  # 14 of 22 grams: another prompt, but one family
    mix = draw(config_of(write(tmp_path / "a.jsonl", rows)))
    assert mix.report["near_duplicates"] == [
        {"id": "a/8", "kept": "a/5", "similarity": 0.8},
        {"id": "a/9", "kept": "a/5", "similarity": 0.8},
    ]
    assert mix.report["joined"] == [{"family": "a/11", "of": ["a/11", "a/5", "a/8", "a/9"]}]
    drawn = {p.id: p for prompts in draw(config_of(write(tmp_path / "a.jsonl", rows), train=30, held_out=10)).prompts.values() for p in prompts}
    assert not {"a/8", "a/9"} & set(drawn)
    kept = draw(config_of(str(tmp_path / "a.jsonl"), near_duplicates=0))
    assert kept.report["near_duplicates"] == [] and kept.report["joined"] == mix.report["joined"]
    off = draw(config_of(str(tmp_path / "a.jsonl"), near_duplicates=0, same_family=0))
    assert off.report["joined"] == []


def test_the_same_words_under_another_system_text_are_asked_something_else(tmp_path: Path) -> None:
    rows = [row(n) for n in range(60)]
    for number, system in ((3, "Answer in French."), (4, "Answer in Greek."), (5, "Answer in Greek.")):
        rows[number]["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": sentence(3)}]
    mix = draw(config_of(write(tmp_path / "a.jsonl", rows)))
    assert [one["id"] for one in mix.report["near_duplicates"]] == ["a/5"]
    assert mix.report["joined"] == [{"family": "a/3", "of": ["a/3", "a/4", "a/5"]}]


def test_recorded_answers_make_no_prompt_another(tmp_path: Path) -> None:
    rows = [row(n) for n in range(60)]
    for number in (20, 21):
        rows[number]["messages"] = [{"role": "user", "content": sentence(20)}, {"role": "assistant", "content": sentence(900 + number)}]
    mix = draw(config_of(write(tmp_path / "a.jsonl", rows)))
    assert mix.report["near_duplicates"] == [{"id": "a/21", "kept": "a/20", "similarity": 1.0}]


@pytest.mark.parametrize("near_duplicates", [0, 0.8])
def test_r14_no_family_and_no_near_duplicate_crosses_the_split(tmp_path: Path, near_duplicates: float) -> None:
    rows = []
    for number in range(120):  # chains of variants: each is like the one before, over the borders of named families
        one = row(number, family=f"f{number}" if number % 3 else f"f{number // 6}")
        one["messages"][0]["content"] = variant(number // 6, number % 6 * 2)
        rows.append(one)
    path = write(tmp_path / "a.jsonl", rows)
    mix = draw(config_of(path, train=60, held_out=9, near_duplicates=near_duplicates, shortfall="report"))
    side = {p.id: split for split, prompts in mix.prompts.items() for p in prompts}
    assert set(side.values()) == {"train", "heldout"}
    grams = {}
    for one in rows:
        words = one["messages"][0]["content"].split()
        grams[f"a/{one['id']}"] = {tuple(words[n : n + 3]) for n in range(len(words) - 2)}
    family = {f"a/{one['id']}": one["family"] for one in rows}
    for left, one in side.items():
        for right, other in side.items():
            if one != other:
                assert family[left] != family[right]
                assert len(grams[left] & grams[right]) < 0.6 * len(grams[left] | grams[right])
    for split, prompts in mix.prompts.items():
        assert all(split_of(p.family, 0.3) == split for p in prompts)  # the one rule, by the joined name


def test_r14_the_split_loses_and_doubles_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(n) for n in range(200)])
    pools = draw(config_of(path, train=1, held_out=1)).report["splits"]
    train, held_out = (pools[split]["cells"][0]["available"] for split in ("train", "heldout"))
    assert train + held_out == 200
    mix = draw(config_of(path, train=train, held_out=held_out))
    ids = [{p.id for p in prompts} for prompts in mix.prompts.values()]
    assert not ids[0] & ids[1] and len(ids[0] | ids[1]) == 200


# contamination


def test_contaminated_prompts_are_removed_reported_or_stop_the_run(tmp_path: Path) -> None:
    rows = [row(n) for n in range(60)]
    suite = write(tmp_path / "bench.jsonl", [{"id": "q7", "prompt": f"Consider this: {sentence(7)} now"}])
    path = write(tmp_path / "a.jsonl", rows)
    options = {"suites": [suite], "contamination_words": 10, "train": 30, "held_out": 5}
    removed, reported = (draw(config_of(path, contamination=what, **options)) for what in ("remove", "report"))
    hit = {"id": "a/7", "suite": "bench", "suite_id": "q7", "ngram": " ".join(sentence(7).split()[:10])}
    assert removed.report["contaminated"] == reported.report["contaminated"] == [hit]
    assert [mix.report["sources"][0]["available"] for mix in (removed, reported)] == [59, 60]
    assert "contaminated, removed: 1" in plan_lines(removed.report) and "contaminated, kept, only reported: 1" in plan_lines(reported.report)
    with pytest.raises(ValueError, match="1 prompts share text with a suite; the first, a/7, with bench q7"):
        draw(config_of(path, contamination="stop", **options))


# the same everywhere


def test_the_same_seed_is_the_same_set_in_another_process(wide: list[str], tmp_path: Path) -> None:
    config = config_of(*wide, {"path": "builtin", "limit": 400}, train=60, held_out=10, seed=3, shortfall="report", **WIDE)
    config = config.model_copy(update={"prompts": config.prompts.model_copy(update={"suites": [wide[0]], "contamination": "report"})})
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_mix import RunConfig, draw, everything
print(everything(draw(RunConfig.model_validate_json({config.model_dump_json()!r}))), sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    outputs = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip())
    assert outputs == {f"{everything(draw(config))} []"}
    again = config.model_copy(update={"run": config.run.model_copy(update={"seed": 4})})
    assert draw(again).prompts["train"] != draw(config).prompts["train"]


def test_the_set_of_a_seed_is_pinned(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(n, family=f"f{n % 50}") for n in range(100)])
    mix = draw(config_of(path, train=12, held_out=3))
    assert [" ".join(p.id.removeprefix("a/") for p in prompts) for prompts in mix.prompts.values()] == PINNED


PINNED = ["54 37 84 80 89 77 48 43 97 5 31 83", "59 19 72"]


def test_a_larger_mix_holds_the_smaller_one(wide: list[str]) -> None:
    small, large = (draw(config_of(*wide, train=count, held_out=5, **WIDE)) for count in (40, 120))
    lost = {p.id for p in small.prompts["train"]} - {p.id for p in large.prompts["train"]}
    assert len(lost) <= 8  # rounding can move one prompt a cell


# kept in the run folder


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from specgraft.regen import mix

    calls: list[int] = []

    def once_more(config: RunConfig, stop: bool = True) -> Mix:
        calls.append(1)
        return draw(config, stop)

    monkeypatch.setattr(mix, "draw", once_more)
    return calls


def test_the_drawn_set_is_kept_and_drawn_anew_when_anything_changed(tmp_path: Path, counted: list[int]) -> None:
    rows = [row(n) for n in range(60)]
    path, suite = write(tmp_path / "a.jsonl", rows), write(tmp_path / "s.jsonl", [{"prompt": "something else entirely here"}])
    run = RunDir(tmp_path / "run")
    config = config_of(path, suites=[suite])
    first = chosen_prompts(config, run)
    assert chosen_prompts(config, run) == first == draw(config).prompts and len(counted) == 1
    kept = read_json(run.prompts / "mix.json")
    assert kept["report"] == json.loads(json.dumps(draw(config).report)) and kept["drawn_from"] == drawn_from(config)
    chosen_prompts(config.model_copy(update={"prompts": config.prompts.model_copy(update={"max_tokens": 99})}), run)
    assert len(counted) == 1  # the limit is held against rendered prompts, not used in drawing
    for change in (lambda: write(tmp_path / "a.jsonl", rows[:-1]), lambda: write(tmp_path / "s.jsonl", [{"prompt": sentence(5)}])):
        before = len(counted)
        change()
        assert chosen_prompts(config, run) == draw(config).prompts and len(counted) == before + 1
    before = len(counted)
    other = config_of(path, suites=[suite], seed=1)
    assert chosen_prompts(other, run) == draw(other).prompts and len(counted) == before + 1


def test_a_damaged_or_half_written_set_is_drawn_anew(tmp_path: Path, counted: list[int]) -> None:
    config, run = config_of(write(tmp_path / "a.jsonl", [row(n) for n in range(60)])), RunDir(tmp_path / "run")
    first = chosen_prompts(config, run)
    text = (run.prompts / "train.jsonl").read_text()
    (run.prompts / "train.jsonl").write_text(text[:-30])
    assert chosen_prompts(config, run) == first and len(counted) == 2
    assert (run.prompts / "train.jsonl").read_text() == text
    (run.prompts / "heldout.jsonl").unlink()
    assert chosen_prompts(config, run) == first and len(counted) == 3


def test_a_run_that_was_moved_goes_on_without_its_sources(tmp_path: Path, counted: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(write(tmp_path / "a.jsonl", [row(n) for n in range(60)]))
    config, run = config_of(str(path)), RunDir(tmp_path / "run")
    first = chosen_prompts(config, run)
    path.unlink()
    assert chosen_prompts(config, run) == first and len(counted) == 1
    assert "not there any more; the prompts kept in" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no such file"):  # other settings cannot be drawn
        chosen_prompts(config_of(str(path), seed=1), run)


def test_answers_of_train_never_become_held_out_when_the_mix_changes(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    answered = Conversation("a", "f", "en", "chat", "train", [1, 2], [False, True], 1, 0, 1, 0, "stop", ids_digest([2]))
    prompts = {split: [Prompt(name, "f", "en", "chat", ({"role": "user", "content": "x"},))] for split, name in (("train", "b"), ("heldout", "a"))}
    rows = [answered, dataclasses.replace(answered, prompt_id="b")]
    with pytest.raises(ValueError, match=r"prompt a was answered as train and is drawn as heldout now, as the sources changed; use another run.name"):
        chosen_rows(RunConfig(), run, prompts, rows)
    assert chosen_rows(RunConfig(), run, prompts, [dataclasses.replace(answered, split="heldout"), rows[1]])


def test_the_plan_shows_what_is_missing_before_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [row(n) for n in range(20)])
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[prompts]\ntrain = 99\nheld_out = 2\nlanguages = {{en = 1}}\ndomains = {{chat = 1}}\n[[prompts.sources]]\npath = "{path}"\n[evaluate]\nprompts = 1\n')
    with pytest.raises(ValueError, match=r"prompts.train=99: the sources cannot fill en-chat"):
        plan([str(run_file)])
    assert "missing" in capsys.readouterr().out
    plan([str(run_file), "prompts.shortfall=report"])
    assert "missing" in capsys.readouterr().out and {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "run.toml"}


def test_a_run_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(n) for n in range(60)] + [row(3) | {"id": "copy"}, {"text": 1}]
    config = config_of(write(tmp_path / "a.jsonl", rows), train=60, shortfall="report")
    chosen_prompts(config, RunDir(tmp_path / "run"))
    said = " ".join(capsys.readouterr().err.split())
    assert "left out: 1 rejected, 1 near-duplicates" in said and "fewer than asked for: train en-chat all:" in said


def test_one_file_is_taken_as_it_is_and_kept_too(tmp_path: Path, counted: list[int]) -> None:
    path = write(tmp_path / "a.jsonl", [row(n % 30) | {"id": str(n)} for n in range(60)])  # every text twice
    config = RunConfig.model_validate({"prompts": {"source": path, "train": 30, "held_out": 5, "held_out_share": 0.3}, "evaluate": {"prompts": 1}})
    mix, run = draw(config), RunDir(tmp_path / "run")
    wanted = [str(n) for n in range(60) if split_of(str(n), 0.3) == "train"][:30]
    assert [p.id for p in mix.prompts["train"]] == wanted
    assert chosen_prompts(config, run) == mix.prompts == chosen_prompts(config, run) and len(counted) == 1
    assert plan_lines(mix.report)[0].startswith("train: 30 of 30 prompts, 30 families")


def test_the_built_in_set_by_itself_is_reported_by_cell() -> None:
    report = draw(RunConfig.model_validate({"prompts": {"train": 40, "held_out": 10}, "evaluate": {"prompts": 1}})).report
    cells = report["splits"]["train"]["cells"]
    assert len(cells) == 12 and sum(cell["wanted"] for cell in cells) == 40
    assert all(cell["wanted"] == cell["got"] for cell in cells)


def test_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row(number) for number in range(40)])
    with pytest.raises(ValueError, match=r"prompts\.languages: the weights are too large"):
        draw(config_of(path, languages={"en": 1e308, "ko": 1e308}))


def test_a_damaged_note_of_the_kept_set_is_named(tmp_path: Path) -> None:
    config, run = config_of(write(tmp_path / "a.jsonl", [row(number) for number in range(80)])), RunDir(tmp_path / "run").create()
    chosen_prompts(config, run)
    (run.prompts / "mix.json").write_text('{"drawn_from": []}')
    with pytest.raises(ValueError, match=r"mix\.json: damaged; delete it, and the set is drawn again"):
        chosen_prompts(config, run)
