"""Answers of servers: nothing lost, nothing double, whatever is killed; files that do not depend on who answers when."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from templates_by_hand import template_of, tok

from engine_stub import StubServer
from specgraft.check.token_identity import token_identity
from specgraft.config import RunConfig
from specgraft.records import Conversation, Prompt, read_conversations
from specgraft.regen import journal, stage
from specgraft.regen.mix import chosen_prompts
from specgraft.regen.render import Chat
from specgraft.regen.renders import Renders
from specgraft.regen.stage import regen
from specgraft.regen.stats import data_summary
from specgraft.run_dir import RunDir
from specgraft.targets.text import TextTarget

END, EOS = 261, 264


def target_of(template: str = "plain") -> TextTarget:
    return TextTarget(tok(template_of(template)), (END, EOS), Path("served"), 4096, "weights")


def answer(ids: list[int]) -> list[int]:
    """Some bytes that depend on the prompt alone, then the end of the turn."""
    return [*(97 + (sum(ids) + 7 * place) % 26 for place in range(1 + sum(ids) % 9)), END]


def server(**changes: Any) -> StubServer:
    return StubServer(**{"engine": "vllm", "answer": answer, "stop_ids": (END, EOS), **changes})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 prompts, every third with three turns."""
    path = tmp_path_factory.mktemp("servers") / "prompts.jsonl"
    rows = []
    for number in range(120):
        turns = [f"{number}: say it", "and more", "and again"][: 3 if number % 3 == 0 else 1]
        domain = ("chat", "code")[number % 2]
        messages = [{"role": "user", "content": turn} for turn in turns]
        rows.append({"id": f"p{number}", "language": "en", "domain": domain, "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(source: Path, *servers: StubServer, prompts: dict[str, Any] | None = None, **section: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "prompts": {
                "source": str(source), "train": 60, "held_out": 10, "held_out_share": 0.3, "near_duplicates": 0,
                "languages": {"en": 1}, "domains": {"chat": 1, "code": 1}, "shortfall": "report", **(prompts or {}),
            },
            "regen": {
                "servers": [one.url for one in servers], "max_new_tokens": 12, "group": 16, "concurrency": 4,
                "retries": 0, "timeout": 20, "temperature": 0.8, **section,
            },
            "evaluate": {"prompts": 4, "sampled_prompts": 2, "speed_prompts": 1},
        }
    )  # fmt: skip


def run_of(tmp_path: Path, name: str = "run") -> RunDir:
    return RunDir(tmp_path / name).create()


def files(run: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.regen.glob("*-*.jsonl"))}


def proved(config: RunConfig, run: RunDir, rows: list[Conversation], target: TextTarget) -> None:
    """The gate passes, and every wanted prompt stands there once with all its turns."""
    prompts = chosen_prompts(config, run)
    chat = Chat(target.tokenizer, target.end_ids)
    outcome = token_identity(rows, Renders(chat, prompts), target.end_ids)
    assert outcome.passed, outcome.detail
    turns = Counter[str]()
    for row in rows:
        turns[row.source_id] += len(row.spans)
    wanted = {prompt.id: len(prompt.messages) for part in prompts.values() for prompt in part}
    assert dict(turns) == wanted


def keys(stub: StubServer) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in stub.asked]


@pytest.fixture(scope="module")
def unbroken(source: Path) -> dict[str, bytes]:
    """Group files of a run that nothing disturbed."""
    run = run_of(source.parent, "unbroken")
    with server() as one:
        config = config_of(source, one)
        rows = regen(config, run, target_of())
        asks = keys(one)
    proved(config, run, rows, target_of())
    assert max(Counter(asks).values()) == 1 and len(asks) == sum(len(row.spans) for row in rows) > 73
    assert {path.name for path in run.regen.iterdir()} == {*files(run), "settings.json"}
    return files(run)


def test_the_files_do_not_depend_on_who_answers_when(source: Path, tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    run = run_of(tmp_path)
    slow: Callable[[list[int]], float] = lambda ids: (sum(ids) % 7) / 1000  # noqa: E731
    with server(delay=slow) as one, server(engine="llamacpp", delay=0.002) as two:
        regen(config_of(source, one, two), run, target_of())
        assert min(len(one.asked), len(two.asked)) > 10 and max(one.most, two.most) <= 4
    assert files(run) == unbroken


def test_a_server_killed_at_request_73_and_a_run_started_again_lose_nothing(
    source: Path, tmp_path: Path, unbroken: dict[str, bytes]
) -> None:
    run = run_of(tmp_path)
    with server(kill_after=73) as one:
        config = config_of(source, one)
        with pytest.raises(ValueError, match="what was answered is kept") as caught:
            regen(config, run, target_of())
        assert "\n" not in str(caught.value)
        written = [json.loads(line) for line in (run.regen / "journal.jsonl").read_text().splitlines()]
        assert 60 <= len(written) <= 73
        asked_before = len(one.asked)
        one.restart()
        rows = regen(config, run, target_of())
        later = keys(one)[asked_before:]
    proved(config, run, rows, target_of())
    assert files(run) == unbroken
    total = sum(len(row.spans) for row in rows)
    assert len(later) == len(set(later)) == total - len(written)  # what was answered is not asked for again
    assert not (run.regen / "journal.jsonl").exists()


def test_a_server_that_comes_back_in_time_goes_unnoticed(source: Path, tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    run = run_of(tmp_path)
    with server(kill_after=73) as one:

        def watch() -> None:
            while one.http is not None:
                time.sleep(0.01)
            while one.http is None:
                with suppress(OSError):  # the port is being closed
                    one.restart()
                time.sleep(0.01)

        thread = threading.Thread(target=watch)
        thread.start()
        regen(config_of(source, one, retries=3), run, target_of())
        thread.join()
    assert files(run) == unbroken


@pytest.mark.parametrize("left", ["cut", "whole", "nothing"])
def test_a_kill_in_the_middle_of_a_line_costs_that_line(source: Path, tmp_path: Path, unbroken: dict[str, bytes], left: str) -> None:
    run = run_of(tmp_path)
    with server(kill_after=20) as one:
        config = config_of(source, one)
        with pytest.raises(ValueError):
            regen(config, run, target_of())
        path = run.regen / "journal.jsonl"
        before = path.read_bytes()
        lines = before.count(b"\n")
        path.write_bytes({"cut": before[:-9], "whole": before, "nothing": b""}[left])
        already = len(one.asked)
        one.restart()
        regen(config, run, target_of())
        total = sum(len(row.spans) for row in read_conversations(run.regen))
        assert len(one.asked) - already == total - {"cut": lines - 1, "whole": lines, "nothing": 0}[left]
    assert files(run) == unbroken


def test_a_damaged_line_is_named(source: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with server(kill_after=20) as one:
        with pytest.raises(ValueError):
            regen(config_of(source, one), run, target_of())
        path = run.regen / "journal.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], '{"id": 1}', *lines[1:]]) + "\n")
        with pytest.raises(ValueError, match=r"journal.jsonl:2: damaged; delete the line"):
            regen(config_of(source, one), run, target_of())


@pytest.mark.parametrize("where", ["journal", "group"])
def test_a_full_disk_is_one_line_and_loses_nothing(
    source: Path, tmp_path: Path, unbroken: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = run_of(tmp_path)
    calls = 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_rename(path: Path, text: str) -> None:
        if path.name == "train-00001.jsonl":
            raise ValueError(f"{path}: could not be written (No space left on device); free space or set run.root")
        original(path, text)

    original = stage.write_text
    with server() as one:
        config = config_of(source, one)
        with monkeypatch.context() as patch:
            if where == "journal":
                patch.setattr(journal.os, "fsync", full)
                patch.setattr(journal, "SYNC", 0.0)
            else:
                patch.setattr(stage, "write_text", full_rename)
            with pytest.raises(ValueError, match=r"jsonl: could not be written \(No space left on device\); free space") as caught:
                regen(config, run, target_of())
        assert "\n" not in str(caught.value)
        rows = regen(config, run, target_of())
    proved(config, run, rows, target_of())
    assert files(run) == unbroken


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Makes these prompts, all of train, the run's."""

    def set_up(prompts: list[Prompt], *servers: StubServer, **section: Any) -> RunConfig:
        monkeypatch.setattr(stage, "chosen_prompts", lambda config, run: {"train": prompts, "heldout": []})
        return config_of(Path("builtin"), *servers, **section)

    return set_up


def prompt(name: str, *texts: str, domain: str = "chat") -> Prompt:
    return Prompt(name, name, "en", domain, tuple({"role": "user", "content": text} for text in texts))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_r10_cut_answers_are_counted_and_the_limit_is_for_new_ids_only(ask: Any, tmp_path: Path, capsys: Any) -> None:
    texts = [f"{number}" for number in range(19)] + ["x" * 97]  # the last: a prompt of 100 ids, and at most 64 new ones
    cut = {tuple(text.encode()) for text in texts[-7:]}
    with server(answer=lambda ids: [120] * 80 if tuple(ids[1:-2]) in cut else [111, END]) as one:
        config = ask([prompt(f"q{n}", text) for n, text in enumerate(texts)], one, max_new_tokens=64)
        rows = regen(config, run_of(tmp_path), target_of())
        again = regen(config, run_of(tmp_path), target_of())
        dropped = regen(ask([prompt(f"q{n}", text) for n, text in enumerate(texts)], one, max_new_tokens=64, cut="drop"), run_of(tmp_path), target_of())
        assert len(one.asked) == 20 and rows == again  # what is left out is not asked for again
    assert "7 of 20 cut at 64 tokens (35%)" in said(capsys)
    assert [row.finish_reason for row in rows] == ["stop"] * 13 + ["length"] * 7
    for row in rows[13:]:
        assert row.input_ids[row.prompt_length :] == [120] * 64  # ends on the engine's last id, no end token is added
    assert rows[19].prompt_length == 100
    assert dropped == rows[:13]
    with pytest.raises(ValueError, match="no answer is left to train on; all are cut"):
        regen(ask([prompt("q19", texts[19])], one, max_new_tokens=64, cut="drop"), run_of(tmp_path), target_of())


def test_r11_ids_are_stored_as_the_engine_gave_them(ask: Any, tmp_path: Path, capsys: Any) -> None:
    target = target_of()
    assert target.tokenizer.encode("ab") == [256]
    with server(answer=lambda ids: [97, 98, END] if 49 in ids else [99, END]) as one:
        rows = regen(ask([prompt("p1", "1"), prompt("p2", "2")], one), run_of(tmp_path), target)
    assert rows[0].input_ids[rows[0].prompt_length :] == [97, 98, END]
    assert "1 of 2 answers are not the ids of their text" in said(capsys)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_r11_an_engine_without_ids_is_refused(ask: Any, tmp_path: Path, engine: str) -> None:
    with server(engine=engine, ids=False) as one:
        with pytest.raises(ValueError, match="no token ids") as caught:
            regen(ask([prompt("p", "x")], one), run_of(tmp_path), target_of())
        assert one.url in str(caught.value) and "\n" not in str(caught.value)
    assert not files(run_of(tmp_path))


def test_r5_every_id_of_a_list_of_ends_ends_an_answer(ask: Any, tmp_path: Path) -> None:
    with server(answer=lambda ids: [111, EOS if 49 in ids else END], stop_ids=()) as one:
        rows = regen(ask([prompt("p1", "1"), prompt("p2", "2")], one), run_of(tmp_path), target_of())
        assert all(set(body["stop_token_ids"]) == {END, EOS} for body in one.bodies)
    assert [row.input_ids[-1] for row in rows] == [EOS, END] and {row.finish_reason for row in rows} == {"stop"}


def test_sampling_per_domain_reaches_the_server(ask: Any, tmp_path: Path) -> None:
    own = {"code": {"temperature": 0.3, "max_new_tokens": 5, "top_k": 9, "greedy_share": 0}, "math": {"greedy_share": 1}}
    domains = ["chat", "code", "math"]
    with server() as one:
        config = ask([prompt(name, name, domain=name) for name in domains], one, by_domain=own, greedy_share=0, top_p=0.9)
        rows = regen(config, run_of(tmp_path), target_of())
        bodies = {target_of().tokenizer.decode(body["prompt"][1:-2]): body for body in one.bodies}
    law = {name: [bodies[name][key] for key in ("temperature", "top_p", "max_tokens")] for name in ("chat", "code")}
    assert law == {"chat": [0.8, 0.9, 12], "code": [0.3, 0.9, 5]}
    assert (bodies["math"]["temperature"], bodies["math"]["max_tokens"]) == (0, 12)
    assert [(row.temperature, row.top_p, row.top_k) for row in rows] == [(0.8, 0.9, 0), (0.3, 0.9, 9), (0.0, 0.9, 0)]
    assert len({body["seed"] for body in bodies.values() if body["temperature"]}) == 2


def test_a_prompt_that_the_template_refuses_stops_or_is_listed_with_its_reason(ask: Any, tmp_path: Path, capsys: Any) -> None:
    odd = Prompt("odd", "odd", "en", "chat", ({"role": "system", "content": "s"}, {"role": "user", "content": "x"}))
    opens = Prompt("opens", "opens", "en", "chat", ({"role": "assistant", "content": "s"}, {"role": "user", "content": "x"}))
    prompts = [prompt("p1", "x"), odd, prompt("long", "x" * 600), opens, prompt("p2", "y")]
    run, target = run_of(tmp_path), target_of("strict")
    with server() as one:
        with pytest.raises(ValueError, match=r"prompt odd: .*no system message"):
            regen(ask(prompts, one), run, target)
        assert not one.asked and not run.regen.exists()
        config = ask(prompts, one, refused="skip")
        rows = regen(config, run, target)
        assert [row.prompt_id for row in rows] == ["p1", "p2"] and len(one.asked) == 2
        listed = [json.loads(line) for line in (run.regen / "refused.jsonl").read_text().splitlines()]
        assert [row["id"] for row in listed] == ["odd", "long", "opens"] and {row["split"] for row in listed} == {"train"}
        for row, words in zip(listed, ("no system message", "prompts.max_tokens allows 512", "opens with the assistant"), strict=True):
            assert words in row["reason"]
        assert "3 prompts left out, the first: odd" in said(capsys)
        assert regen(config, run, target) == rows and len(one.asked) == 2
        regen(ask([prompts[0], prompts[4]], one), run, target)  # mended
        assert not (run.regen / "refused.jsonl").exists()
        with pytest.raises(ValueError, match="every prompt is refused; the first, odd:"):
            regen(ask([odd], one, refused="skip"), run_of(tmp_path, "none"), target)


def test_a_duplicate_id_is_refused_before_any_work(ask: Any, tmp_path: Path) -> None:
    with server() as one:
        with pytest.raises(ValueError, match="prompt p: two prompts have this id"):
            regen(ask([prompt("p", "x"), prompt("p", "y")], one), run_of(tmp_path), target_of())
        with pytest.raises(ValueError, match="prompt p#2: rows of prompt p would get this id"):
            regen(ask([prompt("p", "x"), prompt("p#2", "y")], one), run_of(tmp_path), target_of())
        assert not one.asked
        run = run_of(tmp_path)
        regen(ask([prompt("p", "x")], one), run, target_of())
        (run.regen / "train-00007.jsonl").write_bytes((run.regen / "train-00000.jsonl").read_bytes())
        with pytest.raises(ValueError, match=r"train-00007.jsonl:1: p is answered in .*train-00000.jsonl:1 already"):
            regen(ask([prompt("p", "x")], one), run, target_of())


def test_r12_and_t3_answers_made_with_other_settings_are_not_mixed(ask: Any, tmp_path: Path) -> None:
    run, prompts = run_of(tmp_path), [prompt("p", "x")]
    with server() as one, server(engine="sglang") as two:
        regen(ask(prompts, one), run, target_of())
        before = {path.name: path.read_bytes() for path in run.regen.iterdir()}
        for changed, words in (
            ({"max_new_tokens": 9}, r"another `regen`.*\(max_new_tokens: 12 there, 9 now\)"),
            ({"by_domain": {"chat": {"top_k": 3}}}, "another `regen`.*by_domain"),
            ({"answers": "recorded", "refused": "skip"}, "another `regen`.*answers: target there"),
        ):
            with pytest.raises(ValueError, match=words):
                regen(ask([*prompts, Prompt("q", "q", "en", "chat", RECORDED)], one, **changed), run, target_of())
        with pytest.raises(ValueError, match=r"another `target`.*chat_template"):
            regen(ask(prompts, one), run, target_of("trim"))
        other = target_of()
        other.tokenizer.add_tokens(["<call>"])
        with pytest.raises(ValueError, match=r"another `target`.*tokenizer"):
            regen(ask(prompts, one), run, other)
        config = ask(prompts, one)
        with pytest.raises(ValueError, match="another `seed`"):
            regen(config.model_copy(update={"run": config.run.model_copy(update={"seed": 4})}), run, target_of())
        # where and how fast is no property of the answers; more prompts may come, and the order of the file may change
        elsewhere = ask([prompt("q", "y"), *prompts], two, concurrency=1, timeout=9, retries=2, cut="drop", refused="skip")
        rows = regen(elsewhere, run, target_of())
        assert [row.prompt_id for row in rows] == ["q", "p"] and len(one.asked) == len(two.asked) == 1
    assert {name: data for name, data in before.items() if name in files(run)}.items() <= files(run).items()


def test_r12_answers_in_the_journal_are_not_used_with_other_settings(ask: Any, tmp_path: Path) -> None:
    run, prompts = run_of(tmp_path), [prompt(f"p{n}", f"{n}") for n in range(9)]
    with server(kill_after=5) as one:
        with pytest.raises(ValueError):
            regen(ask(prompts, one, concurrency=1), run, target_of())
        assert not files(run) and (run.regen / "journal.jsonl").exists()
        one.restart()
        with pytest.raises(ValueError, match="another `regen`"):
            regen(ask(prompts, one, max_new_tokens=9), run, target_of())
        already = len(one.asked)
        changed = [*prompts[:1], prompt("p1", "another text"), *prompts[2:]]  # the same id, another prompt: asked anew
        rows = regen(ask(changed, one, concurrency=1), run, target_of())
        assert len(one.asked) - already == 9 - 4 + 1
    chat = Chat(target_of().tokenizer, (END, EOS))
    assert token_identity(rows, Renders(chat, {"train": changed}), (END, EOS)).passed


RECORDED = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "y"})


def test_r14_recorded_answers_need_no_server_and_say_whose_they_are(ask: Any, tmp_path: Path, capsys: Any) -> None:
    with server() as one:
        prompts = [Prompt("p", "p", "en", "chat", RECORDED), prompt("q", "z")]
        with pytest.raises(ValueError, match="prompt q: no assistant turn"):
            regen(ask(prompts, one, answers="recorded"), run_of(tmp_path), target_of())
        rows = regen(ask(prompts, one, answers="recorded", refused="skip"), run_of(tmp_path), target_of())
        assert not one.asked
    assert [(row.prompt_id, row.answers) for row in rows] == [("p", "data set")]
    assert said(capsys).endswith("answers: data set")
    assert data_summary(rows)["answers"] == "data set"
    target_rows = [replace(row, answers="target") for row in rows]
    assert data_summary(target_rows)["answers"] == "target"
