"""`specgraft data`: conversations with their masks, counts, the plan of a mix; no weights, and no torch for plan and stats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from templates_by_hand import answer, family, user

from specgraft import cli
from specgraft.records import Conversation, Turn, ids_digest
from specgraft.regen.render import Chat
from specgraft.regen.show import headline, pieces, print_parts
from specgraft.regen.stats import band, chosen_examples, data_summary, read_refused, stats, stats_lines

Call = Callable[..., tuple[int, str, str]]


def row(
    name: str, ids: list[int], start: int, split: str = "train", language: str = "en", domain: str = "chat", reason: str = "stop",
    turns: tuple[Turn, ...] = (), number: int = 1, answers: str = "target",
) -> Conversation:  # fmt: skip
    mask = [any(t.start <= place < t.stop for t in turns) if turns else place >= start for place in range(len(ids))]
    digest = ids_digest(ids[start:])
    return Conversation(
        name, f"f-{name}", language, domain, split, ids, mask, start, 0.0, 1.0, 0, reason, digest, number, turns, answers
    )


TURNS = (Turn(3, 6, "stop", "a"), Turn(8, 10, "length", "b"))
ROWS = [
    row("a", list(range(60, 70)), 3, turns=TURNS, reason="length"),
    row("b", list(range(60, 260)), 190, "heldout", "ko", "math"),
    row("c", list(range(60, 80)), 10, language="ja", reason="length"),
    row("c#2", list(range(60, 84)), 20, language="ja", number=2),
]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specgraft", "data", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


@pytest.fixture
def run_file(make_run_file: Callable[[Path], Path], tmp_path: Path) -> Path:
    """A run whose answers are `ROWS`."""
    path = make_run_file(tmp_path)
    folder = tmp_path / "runs" / "pilot" / "regen"
    folder.mkdir(parents=True)
    for split in ("train", "heldout"):
        lines = [json.dumps(one.to_json()) + "\n" for one in ROWS if one.split == split]
        (folder / f"{split}-00000.jsonl").write_text("".join(lines))
    (folder / "refused.jsonl").write_text('{"id": "z", "split": "train", "reason": "no system message"}\n')
    return path


def test_pieces_are_the_stretches_of_the_mask() -> None:
    mine = family("chatml")
    [found] = Chat(mine.tokenizer, mine.end_ids).answered([user("안녕"), answer("네"), user("y"), answer("ok")])
    parts = pieces(mine.tokenizer, found.ids, found.mask)
    assert [part.supervised for part in parts] == [False, True, False, True, False]
    assert [part.text for part in parts if part.supervised] == ["네<|im_end|>", "ok<|im_end|>"]
    assert "".join(part.text for part in parts) == mine.tokenizer.decode(found.ids)


@pytest.mark.parametrize(("colour", "expected"), [(True, "\x1b[1;32mok<|end|>"), (False, "⟦ok<|end|>⟧")])
def test_colour_on_a_terminal_and_marks_elsewhere(colour: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    mine = family("plain")
    [found] = Chat(mine.tokenizer, mine.end_ids).answered([user("[bold]x[/bold]"), answer("ok")])
    console = Console(force_terminal=colour, color_system="standard" if colour else None, width=80)
    with console.capture() as seen:
        print_parts(console, "title", pieces(mine.tokenizer, found.ids, found.mask))
    assert expected in seen.get() and "[bold]x[/bold]" in seen.get()
    assert ("⟦" in seen.get()) != colour


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(force_terminal=True, width=80)
    with console.capture() as seen:
        print_parts(console, "title", [*pieces(family("plain").tokenizer, [111, 107], [True, True])])
    assert seen.get() == "title\n⟦ok⟧\n\n"


def test_the_headline_says_what_a_row_is() -> None:
    assert headline(ROWS[0]) == (
        "a  train, en, chat, family f-a; 10 tokens, 5 supervised (50%); 2 answers (stop, length); answers: target, greedy"
    )


def test_stats_add_up() -> None:
    found = stats(ROWS, [{"reason": "x"}, {"reason": "x"}])
    whole = found["all"]
    assert (whole["prompts"], whole["rows"], whole["answers"], whole["multi_turn"]) == (3, 4, 5, 2)
    assert (whole["tokens"], whole["supervised"], whole["cut"]) == (254, 5 + 10 + 10 + 4, 2)
    assert whole["end_reasons"] == {"length": 2, "stop": 3}
    for axis, parts in found["by"].items():
        for key in ("rows", "answers", "tokens", "supervised", "cut"):
            assert sum(part[key] for part in parts.values()) == whole[key], (axis, key)
    assert list(found["by"]["length"]) == ["0-127", "128-255"]
    assert found["refused"] == {"prompts": 2, "reasons": {"x": 2}}
    lines = stats_lines(found)
    assert lines[1].split() == ["all", "3", "4", "5", "254", "29", "11%", "2", "2"]
    assert "ends: length 2, stop 3; 2 of 5 cut (40%)" in lines


def test_r10_cut_answers_are_shown_as_a_share() -> None:
    rows = [row(f"p{n}", [1, 2, 3], 1, reason="length" if n < 7 else "stop") for n in range(20)]
    assert "7 of 20 cut (35%)" in "\n".join(stats_lines(stats(rows)))


def test_bands() -> None:
    assert [band(count) for count in (0, 127, 128, 300, 8191, 8192)] == ["0-127", "0-127", "128-255", "256-511", "4096-8191", "8192-"]


def test_the_summary_for_the_report_shows_one_with_several_answers_and_another_kind() -> None:
    assert [one.prompt_id for one in chosen_examples(ROWS)] == ["a", "c"]
    assert chosen_examples([]) == [] and len(chosen_examples(ROWS[:1])) == 1
    found = data_summary(ROWS, family("plain").tokenizer)
    assert found["conversations"] == 4 and found["prompts"] == 3 and found["splits"] == {"heldout": 1, "train": 3}
    first = found["examples"][0]
    assert [part["supervised"] for part in first["pieces"]] == [False, True, False, True]
    assert "".join(part["text"] for part in first["pieces"]) == "".join(map(chr, range(60, 70)))
    json.dumps(found)


def test_show_and_stats_of_a_run(call: Call, run_file: Path, tmp_path: Path) -> None:
    code, out, err = call("show", str(run_file), "--number", "9")
    assert code == 0 and err == "" and [line.split()[0] for line in out.splitlines() if " supervised (" in line] == ["a", "c", "c#2", "b"]
    assert out.count("⟦") == 5
    code, out, _ = call("show", str(run_file), "--id", "c")
    assert [line.split()[0] for line in out.splitlines() if " supervised (" in line] == ["c", "c#2"]
    code, out, _ = call("show", str(run_file), "--split", "heldout")
    assert out.startswith("b  heldout")
    target = tmp_path / "stats.json"
    code, out, _ = call("stats", str(run_file), "--json", str(target))
    assert code == 0 and "1 x no system message" in out and json.loads(target.read_text())["all"]["rows"] == 4


def test_show_before_anything_is_answered_shows_prompts(call: Call, make_run_file: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make_run_file(tmp_path)
    code, out, err = call("show", str(path), "--number", "2")
    assert code == 0 and out.count("not answered yet") == 2 and "no answers yet" in err
    assert "<|start|>user\n" in out and out.rstrip().endswith("<|start|>assistant") and "⟦" not in out
    assert not (tmp_path / "runs").exists()  # nothing is written


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("show", "--id", "none"), "no answers of prompt 'none' there"), (("show", "--split", "test"), "--split test: give train or heldout")],
)
def test_what_is_not_there_is_one_line(call: Call, run_file: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = call(arguments[0], str(run_file), *arguments[1:])
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_stats_without_answers_and_a_damaged_list(call: Call, make_run_file: Callable[[Path], Path], tmp_path: Path) -> None:
    code, _, err = call("stats", str(make_run_file(tmp_path)))
    assert code == 2 and "no answers there; run `specgraft regen` first" in err
    (tmp_path / "refused.jsonl").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        read_refused(tmp_path)


def test_plan_prints_the_mix_and_loads_no_torch(make_run_file: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make_run_file(tmp_path)
    code = (
        "import sys; from specgraft import cli\n"
        f"sys.argv = ['specgraft', 'data', 'plan', {str(path)!r}, '--json', {str(tmp_path / 'plan.json')!r}]\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print('loaded', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "train: 10 of 10 prompts" in done.stdout and done.stdout.endswith("loaded []\n")
    assert json.loads((tmp_path / "plan.json").read_text())["splits"]["train"]["got"] == 10
    assert not (tmp_path / "runs").exists()
