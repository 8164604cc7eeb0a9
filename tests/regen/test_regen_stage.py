"""Answers of a target on disk: whole groups, resumed to the same bytes, ids as generated; what is refused writes nothing."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specgraft.config import RunConfig
from specgraft.records import Conversation, ids_digest, read_conversations
from specgraft.regen import stage
from specgraft.regen.prompts import split_of
from specgraft.regen.render import render
from specgraft.regen.stage import chosen_prompts, regen, temperature_of
from specgraft.run_dir import RunDir
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target
from specgraft.targets.model import Target

TEXTS = ("count to ten", "write a poem about rain", "what is the name of this?", "ab ab ab", "안녕하세요", "2 + 2 =")
STRICT = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant turns') }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return load_target(str(tiny_folder), "float32")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Twenty prompts, each its own family."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"p{number}", "language": "en", "domain": "chat",
         "messages": [{"role": "user", "content": f"{number}: {TEXTS[number % len(TEXTS)]}"}]}
        for number in range(20)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def config_of(source: Path, **regen_section: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "prompts": {"source": str(source), "train": 9, "held_out": 4, "held_out_share": 0.35, "max_tokens": 64},
            "regen": {"max_new_tokens": 12, "batch": 3, "group": 4, "greedy_share": 0.4, "temperature": 0.8, **regen_section},
            "evaluate": {"prompts": 4, "sampled_prompts": 2, "speed_prompts": 1},
        }
    )


def run_of(tmp_path: Path, name: str = "run") -> RunDir:
    return RunDir(tmp_path / name).create()


def contents(run: RunDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.regen.iterdir()} if run.regen.exists() else {}


def test_answers_are_stored_as_generated_in_groups_train_first(target, prompts, tmp_path) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    found = regen(config, run, target)
    assert [c.split for c in found] == ["train"] * 9 + ["heldout"] * 4
    sizes = {path.name: len(path.read_text().splitlines()) for path in sorted(run.regen.glob("*.jsonl"))}
    assert sizes == {"heldout-00000.jsonl": 4, "train-00000.jsonl": 4, "train-00001.jsonl": 4, "train-00002.jsonl": 1}
    assert sorted(read_conversations(run.regen), key=lambda c: c.prompt_id) == sorted(found, key=lambda c: c.prompt_id)
    by_id = {prompt.id: prompt for part in chosen_prompts(config).values() for prompt in part}
    for c in found:
        prompt = by_id[c.prompt_id]
        assert c.input_ids[: c.prompt_length] == render(target.tokenizer, prompt, 64)
        answer = c.input_ids[c.prompt_length :]
        assert c.loss_mask == [False] * c.prompt_length + [True] * len(answer)
        assert 1 <= len(answer) <= 12 and c.digest == ids_digest(answer)
        assert c.split == split_of(c.family, 0.35) and (c.language, c.domain) == ("en", "chat")
        assert c.temperature == temperature_of(config, c.prompt_id, c.split) in (0.0, 0.8)
    assert {c.temperature for c in found if c.split == "train"} == {0.0, 0.8}
    assert {c.temperature for c in found if c.split == "heldout"} == {0.0}
    greedy = [c for c in found if c.temperature == 0]
    for c in greedy:
        request = Request(c.input_ids[: c.prompt_length], 12)
        generate(target, [request], 1)
        assert c.input_ids[c.prompt_length :] == request.output
    assert not list(run.regen.glob(".*"))


def test_a_stopped_run_goes_on_to_the_same_bytes(target, prompts, tmp_path, monkeypatch) -> None:
    whole, stopped = run_of(tmp_path, "whole"), run_of(tmp_path, "stopped")
    config = config_of(prompts)
    expected = regen(config, whole, target)
    calls: list[list[Request]] = []

    def counted(target: Any, requests: list[Request], *args: Any) -> None:
        calls.append(requests)
        if len(calls) == 2:
            generate(target, requests[:2], 1)  # part of the group is answered, then the kill
            raise KeyboardInterrupt
        generate(target, requests, *args)

    monkeypatch.setattr(stage, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        regen(config, stopped, target)
    assert set(contents(stopped)) == {"settings.json", "train-00000.jsonl"}
    (stopped.regen / ".train-00001.jsonl.1.tmp").write_text("half")
    calls[:] = [[], []]
    assert regen(config, stopped, target) == expected
    assert sum(map(len, calls)) == 13 - 4  # what was answered is not answered again
    assert contents(stopped) == contents(whole)
    calls.clear()
    assert regen(config, stopped, target) == expected and not calls


def test_the_answer_of_a_prompt_does_not_depend_on_its_place_in_the_file(target, prompts, tmp_path) -> None:
    reordered = tmp_path / "reordered.jsonl"
    reordered.write_text("".join(line + "\n" for line in reversed(prompts.read_text().splitlines())))
    first = {c.prompt_id: c for c in regen(config_of(prompts), run_of(tmp_path, "a"), target)}
    second = {c.prompt_id: c for c in regen(config_of(reordered), run_of(tmp_path, "b"), target)}
    shared = first.keys() & second.keys()
    assert len(shared) >= 4 and all(first[name] == second[name] for name in shared)


def test_finish_reasons_and_cut_answers_are_kept_and_counted(target, prompts, tmp_path, monkeypatch, capsys) -> None:
    texts = [c.input_ids[c.prompt_length :] for c in regen(config_of(prompts), run_of(tmp_path, "free"), target)]
    ends = (texts[0][3], texts[-1][6])
    monkeypatch.setattr(target, "end_ids", ends)
    capsys.readouterr()
    found = regen(config_of(prompts), run_of(tmp_path, "ends"), target)
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for c in found:
        answer = c.input_ids[c.prompt_length :]
        assert not set(answer[:-1]) & set(ends)
        assert (answer[-1] in ends) == (c.finish_reason == "stop")  # the end token is kept, and none is added to a cut answer
        assert c.finish_reason == "stop" or len(answer) == 12
    cut = sum(c.finish_reason == "length" for c in found)
    assert f"{cut} of 13 cut at 12 tokens ({cut / 13:.0%})" in capsys.readouterr().err


def refusal(config: RunConfig, run: RunDir, target: Target) -> str:
    before = contents(run)
    with pytest.raises(ValueError) as caught:
        regen(config, run, target)
    message = str(caught.value)
    assert "\n" not in message
    assert contents(run) == before  # nothing was written
    return message


def test_a_prompt_longer_than_the_limit_is_refused_before_any_answer(target, prompts, tmp_path) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "family": "p3", "messages": [{"role": "user", "content": "x" * 80}]}) + "\n")
    config = config_of(prompts)
    counts = {split: sum(split_of(f"p{n}", 0.35) == split for n in range(20)) for split in ("train", "heldout")}
    long_split = split_of("p3", 0.35)
    update = {"train": counts["train"] + (long_split == "train"), "held_out": counts["heldout"] + (long_split != "train")}
    config = config.model_copy(update={"prompts": config.prompts.model_copy(update=update)})
    message = refusal(config, run_of(tmp_path), target)
    assert "prompt long: " in message and "prompts.max_tokens allows 64" in message
    assert long_split == "heldout"  # the train prompts come first, and none of them was answered


def test_answers_beyond_the_context_of_the_target_are_refused(target, prompts, tmp_path) -> None:
    message = refusal(config_of(prompts, max_new_tokens=250), run_of(tmp_path), target)
    assert "the target's context is 256: lower regen.max_new_tokens" in message
    assert len(regen(config_of(prompts, max_new_tokens=2), run_of(tmp_path), target)) == 13  # and the advice works


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "7"}],
    ],
)
def test_a_template_that_refuses_the_roles_is_one_line_naming_prompt_and_roles(target, tmp_path, monkeypatch, messages) -> None:
    monkeypatch.setattr(target.tokenizer, "chat_template", STRICT)
    path = tmp_path / "odd.jsonl"
    rows = [{"id": f"odd{n}", "messages": messages} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refusal(config_of(path), run_of(tmp_path), target)
    assert "prompt odd" in message and "only user and assistant turns" in message
    assert " ".join(m["role"] for m in messages) in message


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [("regen", "max_new_tokens", 10, "regen"), ("regen", "temperature", 0.5, "regen"), ("run", "seed", 3, "seed"),
     ("prompts", "held_out_share", 0.4, "held_out_share")],
)  # fmt: skip
def test_answers_made_with_other_settings_are_not_mixed(target, prompts, tmp_path, section, key, value, named) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    regen(config, run, target)
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    message = refusal(changed, run, target)
    assert f"holds answers made with another `{named}`; use another run.name" in message


def test_answers_of_another_target_are_not_mixed(target, prompts, tmp_path, tiny_folder) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    regen(config, run, target)
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    (folder / "chat_template.jinja").write_text(STRICT)
    for other in (load_target(str(folder), "float32"), load_target(str(tiny_folder), "bfloat16")):
        assert "another `target`" in refusal(config, run, other)


def test_more_prompts_may_be_asked_for_later(target, prompts, tmp_path) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    first = regen(config, run, target)
    more = config.model_copy(update={"prompts": config.prompts.model_copy(update={"train": 12})})
    found = regen(more, run, target)
    assert len(found) == 16 and found[:9] == first[:9]


def test_too_few_prompts_are_refused_naming_the_key(prompts, tmp_path, target) -> None:
    config = config_of(prompts)
    config = config.model_copy(update={"prompts": config.prompts.model_copy(update={"train": 90})})
    assert "prompts.train=90, but" in refusal(config, run_of(tmp_path), target)


@pytest.mark.parametrize("damage", ["cut", "mask", "junk"])
def test_a_damaged_file_of_answers_is_named_with_its_line(target, prompts, tmp_path, damage) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    regen(config, run, target)
    path = run.regen / "train-00001.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    lines[2] = {"cut": lines[2][:-9], "mask": json.dumps({**row, "loss_mask": row["loss_mask"][:-1]}), "junk": '{"a": 1}'}[damage]
    path.write_text("\n".join(lines) + "\n")
    assert f"{path}:3: " in refusal(config, run, target)


def test_the_greedy_share_is_a_property_of_the_prompt() -> None:
    config = RunConfig.model_validate({"regen": {"greedy_share": 0.3, "temperature": 0.7}})
    temperatures = [temperature_of(config, f"p{number}", "train") for number in range(3_000)]
    assert set(temperatures) == {0.0, 0.7}
    assert temperatures.count(0.0) / 3_000 == pytest.approx(0.3, abs=0.03)
    assert {temperature_of(config, f"p{number}", "heldout") for number in range(50)} == {0.0}
    all_greedy = RunConfig.model_validate({"regen": {"greedy_share": 1.0}})
    assert {temperature_of(all_greedy, f"p{number}", "train") for number in range(50)} == {0.0}


def test_a_conversation_reads_back_as_it_was_written() -> None:
    row = Conversation("p", "f", "ko", "chat", "train", [1, 2], [False, True], 1, 0.7, 0.9, 20, "stop", ids_digest([2]))
    assert Conversation(**json.loads(json.dumps(row.to_json()))) == row


def test_a_group_file_that_was_deleted_is_answered_again_and_no_other_is_touched(target, prompts, tmp_path) -> None:
    config, run = config_of(prompts), run_of(tmp_path)
    regen(config, run, target)
    before = contents(run)
    (run.regen / "train-00000.jsonl").unlink()  # what `read_conversations` advises for a damaged one
    regen(config, run, target)
    assert contents(run) == before


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a'.index('b') }}", "{{ raise_exception('two\\nlines') }}"])
def test_whatever_a_template_does_is_one_line_naming_the_prompt(target, prompts, template: str) -> None:
    prompt = chosen_prompts(config_of(prompts))["train"][0]
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"prompt {prompt.id}: the target's chat template refuses it") as caught:
        render(tokenizer, prompt, 64)
    assert "\n" not in str(caught.value)
