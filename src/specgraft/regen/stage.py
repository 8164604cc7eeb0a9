"""`regen`: prompts -> Conversations answered by the target.

Prompts are answered in groups; a finished group is one file, written whole. In process a kill costs the unfinished group, which
is answered again from its start, so that the ids do not depend on when the run was stopped. Answers of servers are written down
one by one, and a kill costs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

from specgraft.config import RunConfig
from specgraft.log import Bar, progress, say
from specgraft.records import Conversation, Prompt, read_conversations
from specgraft.regen.answered import REFUSED, chosen_rows, refuse_other_splits, refuse_same_ids, summary_line
from specgraft.regen.answerers import Answerer, InProcess, Servers
from specgraft.regen.dialogue import Dialogue
from specgraft.regen.journal import Journal, key_of
from specgraft.regen.mix import chosen_prompts
from specgraft.regen.recorded import recorded_rows
from specgraft.regen.render import Chat
from specgraft.regen.sampling import sampling_of, temperature_of
from specgraft.regen.settings import check_settings, settings
from specgraft.run_dir import RunDir, write_text
from specgraft.targets.generate import generate
from specgraft.targets.model import Target
from specgraft.targets.text import TextTarget

__all__ = ["check_settings", "chosen_prompts", "regen", "settings", "temperature_of"]
JOURNAL = "journal.jsonl"
SPLITS = ("train", "heldout")
Made = TypeVar("Made")


def regen(config: RunConfig, run: RunDir, target: Target | TextTarget) -> list[Conversation]:
    """Answers what has no answer yet and returns all rows of the run, train first.

    A `TextTarget` is enough for answers of servers and for recorded ones. Raises ValueError, in one line, for a prompt that
    cannot be answered (regen.refused = "stop"), other settings than those of the answers there, servers that fail.
    """
    prompts = chosen_prompts(config, run)
    refuse_same_ids(prompts)
    for path in run.regen.glob(".*.tmp"):
        path.unlink()
    there = read_conversations(run.regen)
    refuse_other_splits(run, prompts, there)
    have = {c.source_id for c in there}
    waiting = {split: [prompt for prompt in prompts[split] if prompt.id not in have] for split in SPLITS}
    chat = Chat(target.tokenizer, target.end_ids, config.regen.thinking)
    refused: list[dict[str, str]] = []

    def each(split: str, make: Callable[[Prompt, str], Made]) -> list[Made]:
        """What is made of every waiting prompt; those refused go on the list, or stop the run."""
        made = []
        for prompt in waiting[split]:
            try:
                made.append(make(prompt, split))
            except ValueError as error:
                if config.regen.refused == "stop":
                    raise
                refused.append({"id": prompt.id, "split": split, "reason": str(error).removeprefix(f"prompt {prompt.id}: ")})
        return made

    limits = (config.prompts.max_tokens, target.context)
    any_there = bool(have) or (run.regen / JOURNAL).exists()
    # every prompt of both splits is rendered before the first is answered: a bad one costs no work
    if config.regen.answers == "recorded":
        recorded = {split: each(split, lambda prompt, split: recorded_rows(chat, prompt, split, *limits)) for split in SPLITS}
        _begin(config, run, target, chat, any_there, refused, prompts)
        for split in SPLITS:
            _write_groups(config, run, split, recorded[split])
    else:
        dialogues = {
            split: each(split, lambda prompt, split: Dialogue(chat, prompt, split, sampling_of(config, prompt, split), *limits))
            for split in SPLITS
        }
        _begin(config, run, target, chat, any_there, refused, prompts)
        answerer = Servers(config, target.end_ids) if config.regen.servers else InProcess(target, config, generate)
        for split in SPLITS:
            _answer(config, run, split, dialogues[split], answerer)
        (run.regen / JOURNAL).unlink(missing_ok=True)
    rows = read_conversations(run.regen)
    found = chosen_rows(config, run, prompts, rows)
    for split in SPLITS:
        if prompts[split] and not any(row.split == split for row in found):
            raise ValueError(f"{run.regen}: no {split} prompt has an answer ({len(prompts[split])} refused, see refused.jsonl): change prompts.sources or regen.answers")
    say(summary_line(config, prompts, rows, found, target.tokenizer))
    return found


def _begin(
    config: RunConfig,
    run: RunDir,
    target: Target | TextTarget,
    chat: Chat,
    any_there: bool,
    refused: Sequence[dict[str, str]],
    prompts: dict[str, list[Prompt]],
) -> None:
    """Settings are compared and what was refused is listed, before the first answer."""
    if len(refused) == sum(map(len, prompts.values())):
        raise ValueError(f"regen: every prompt is refused; the first, {refused[0]['id']}: {refused[0]['reason']}")
    check_settings(run.regen / "settings.json", settings(config, target, chat), "answers", any_there)
    path = run.regen / REFUSED
    if refused:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in refused))
        say(f"regen: {len(refused)} prompts left out, the first: {refused[0]['id']}: {refused[0]['reason']}; all in {path}")
    else:
        path.unlink(missing_ok=True)


def _answer(config: RunConfig, run: RunDir, split: str, dialogues: list[Dialogue], answerer: Answerer) -> None:
    """Answers all dialogues of a split and writes their groups."""
    if not dialogues:
        return
    size = config.regen.group
    groups = [dialogues[start : start + size] for start in range(0, len(dialogues), size)]
    paths = list(islice(_free(run, split), len(groups)))
    with progress(f"regen {split}", len(dialogues)) as bar:
        if not config.regen.servers:
            for path, group in zip(paths, groups, strict=True):
                _rounds(group, answerer, bar, lambda dialogue: None)
                _write(path, group)
            return
        left = [len(group) for group in groups]
        place = {dialogue.prompt.id: number for number, group in enumerate(groups) for dialogue in group}
        with Journal(run.regen / JOURNAL) as journal:

            def ended(dialogue: Dialogue) -> None:
                number = place[dialogue.prompt.id]
                left[number] -= 1
                if not left[number]:
                    _write(paths[number], groups[number])

            _rounds(dialogues, answerer, bar, ended, journal)


def _rounds(
    dialogues: Sequence[Dialogue],
    answerer: Answerer,
    bar: Bar,
    ended: Callable[[Dialogue], None],
    journal: Journal | None = None,
) -> None:
    """Puts turn after turn until every dialogue is through; answers that the journal holds are not asked for again."""
    first = bar.done

    def through(dialogue: Dialogue) -> None:
        if dialogue.asked is None:
            bar.at(bar.done + 1)
            ended(dialogue)

    if journal:
        for dialogue in dialogues:
            while dialogue.asked and (known := journal.found.get(key_of(dialogue.prompt.id, dialogue.turn, dialogue.asked))):
                dialogue.hear(*known)
            through(dialogue)
    while waiting := [dialogue for dialogue in dialogues if dialogue.asked]:

        def done(index: int, ids: list[int], reason: str, waiting: list[Dialogue] = waiting) -> None:
            dialogue = waiting[index]
            assert dialogue.asked is not None
            if journal:
                journal.add(key_of(dialogue.prompt.id, dialogue.turn, dialogue.asked), ids, reason)
            dialogue.hear(ids, reason)
            through(dialogue)

        answerer(waiting, done, lambda text: bar.at(bar.done, text))
    assert bar.done == first + len(dialogues)


def _write_groups(config: RunConfig, run: RunDir, split: str, rows: Sequence[list[Conversation]]) -> None:
    size = config.regen.group
    for path, start in zip(_free(run, split), range(0, len(rows), size), strict=False):
        _write_rows(path, [row for part in rows[start : start + size] for row in part])


def _write(path: Path, group: Sequence[Dialogue]) -> None:
    _write_rows(path, [row for dialogue in group for row in dialogue.conversations()])


def _write_rows(path: Path, rows: Sequence[Conversation]) -> None:
    write_text(path, "".join(json.dumps(row.to_json()) + "\n" for row in rows))


def _free(run: RunDir, split: str) -> Iterator[Path]:
    """Paths of group files that are not there yet, in order."""
    return (path for number in count() if not (path := run.regen / f"{split}-{number:05d}.jsonl").exists())
