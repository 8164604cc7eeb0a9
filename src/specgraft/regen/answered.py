"""The answers of a run, read back: which rows a stage gets, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specgraft.config import RunConfig
from specgraft.records import Conversation, Prompt
from specgraft.regen.dialogue import script, without_cut
from specgraft.regen.sampling import sampling_of
from specgraft.run_dir import RunDir

REFUSED = "refused.jsonl"
LOOKED_AT = 2000  # answers that are encoded anew, to say how many do not round-trip


def refuse_same_ids(prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Raises ValueError for an id that two prompts bear, or that a later row of another prompt would get."""
    ids: set[str] = set()
    for part in prompts.values():
        for prompt in part:
            if prompt.id in ids:
                raise ValueError(f"prompt {prompt.id}: two prompts have this id; give every prompt its own, or remove the copy")
            ids.add(prompt.id)
    for name in ids:
        first, mark, number = name.rpartition("#")
        if mark and number.isdigit() and first in ids:
            raise ValueError(f"prompt {name}: rows of prompt {first} would get this id; rename it")


def refuse_other_splits(run: RunDir, prompts: Mapping[str, Sequence[Prompt]], there: Sequence[Conversation]) -> None:
    """Raises ValueError where a changed mix, which joins other families, would measure what was trained on, or the reverse."""
    side = {prompt.id: split for split, part in prompts.items() for prompt in part}
    for row in there:
        if (now := side.get(row.source_id, row.split)) != row.split:
            raise ValueError(
                f"{run.regen}: prompt {row.source_id} was answered as {row.split} and is drawn as {now} now, as the sources changed; use "
                "another run.name, or delete that folder"
            )


def refused_ids(run: RunDir) -> set[str]:
    """Ids of the prompts that regen left out, with reasons, in RUN/regen/refused.jsonl."""
    path = run.regen / REFUSED
    if not path.exists():
        return set()
    try:
        return {str(json.loads(line)["id"]) for line in path.read_text(encoding="utf-8").split("\n") if line}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: damaged; delete it and run regen again") from None


def chosen_rows(
    config: RunConfig, run: RunDir, prompts: Mapping[str, Sequence[Prompt]], there: Sequence[Conversation]
) -> list[Conversation]:
    """The rows of these prompts among those `there`, train first, in the order of the prompts; cut answers of train are left out where asked.

    Held-out prompts are answered anew where they are measured, so they stay. Raises ValueError when prompts have no answer.
    """
    rows: dict[str, list[Conversation]] = {}
    for row in there:
        rows.setdefault(row.source_id, []).append(row)
    wanted = [prompt.id for part in prompts.values() for prompt in part]
    refuse_other_splits(run, prompts, there)
    left_out = refused_ids(run)
    if missing := sum(name not in rows and name not in left_out for name in wanted):
        raise ValueError(f"{run.regen}: {missing} of {len(wanted)} prompts have no answer yet; run regen first")
    found = []
    for name in wanted:
        for row in sorted(rows.get(name, []), key=lambda row: row.row):
            kept = without_cut(row) if config.regen.cut == "drop" and row.split == "train" else row
            if kept is not None:
                found.append(kept)
    if not any(row.split == "train" for row in found):
        raise ValueError(f"{run.regen}: no answer is left to train on; all are cut: raise regen.max_new_tokens, or regen.cut=keep")
    return found


def summary_line(
    config: RunConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    there: Sequence[Conversation],
    kept: Sequence[Conversation],
    tokenizer: Any,
) -> str:
    """What regen says at its end: answers, tokens, cut ones, turns and rows, ids that are not those of their text."""
    by_id = {prompt.id: (prompt, split) for split, part in prompts.items() for prompt in part}
    rows = [row for row in there if row.source_id in by_id]
    spans = [span for row in rows for span in row.spans]
    cut = sum(span.finish_reason == "length" for span in spans)
    limits = {sampling_of(config, *by_id[row.source_id]).max_new_tokens for row in rows}
    at = f"{limits.pop()} tokens" if len(limits) == 1 else "their limits"
    tokens = sum(span.stop - span.start for span in spans)
    label = "" if config.regen.answers == "target" else " of the data set"
    text = f"regen: {len(spans)} answers{label}, {tokens} tokens; {cut} of {len(spans)} cut at {at} ({cut / len(spans):.0%})"
    if config.regen.cut == "drop" and cut:
        text += f", those of train left out ({sum(map(_answers, rows)) - sum(map(_answers, kept))})"
    several = sum(bool(row.turns) for row in rows)
    again = sum(row.row > 1 for row in rows)
    if several or again:
        text += f"; {len(rows)} rows, {several} hold several turns, {again} begun anew as the ids of earlier turns changed"
    if config.regen.answers == "target":
        asked = sum(len(script(by_id[name][0])) for name in {row.source_id for row in rows})
        if asked > len(spans):
            text += f"; {asked - len(spans)} turns not put (behind a cut answer, or the context was full)"
        looked, apart = round_trips(tokenizer, rows)
        text += f"; {apart} of {looked} answers are not the ids of their text"
    return text + f"; answers: {'target' if config.regen.answers == 'target' else 'data set'}"


def _answers(row: Conversation) -> int:
    return len(row.spans)


def round_trips(tokenizer: Any, rows: Sequence[Conversation]) -> tuple[int, int]:
    """(answers looked at, those whose text encodes to other ids): text would have changed them, ids did not."""
    looked = apart = 0
    for row in rows:
        for span in row.spans:
            if looked == LOOKED_AT:
                return looked, apart
            ids = row.input_ids[span.start : span.stop]
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            looked += 1
            apart += tokenizer.encode(text, add_special_tokens=False) != ids
    return looked, apart
