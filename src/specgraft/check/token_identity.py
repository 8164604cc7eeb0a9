"""Gate "token identity": what is trained on is what the engine read and wrote, id by id, from the prompt to the shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from specgraft.records import Conversation, GateResult, Turn, ids_digest

NAME = "token identity"
SHOWN = 3  # offenders named
SAMPLE = 20_000  # prompts of a larger set that are looked at; all of them with `check --all`
SHARD_SAMPLE = 64  # rows of a shard, likewise

Recorded = Callable[[str], Sequence[tuple[list[int], list[bool]]]]  # prompt id -> ids and mask of every row
Stored = tuple[str, str, list[int], list[bool]]  # file, row id, ids, mask


def token_identity(
    conversations: Sequence[Conversation],
    render: Callable[..., list[int]],
    end_ids: Collection[int],
    recorded: Recorded | None = None,
    sample: int = 0,
) -> GateResult:
    """Compares every answer's prompt with a fresh render and its ids with the digest taken when they were generated.

    `render(prompt_id)` gives the ids of a prompt (the target's chat template, called anew), `render(prompt_id, answers)` those of
    the turn behind these answers (generated ids). Text that was decoded and re-encoded has another digest even where it reads the
    same. Answers of the data set are compared with `recorded`. `sample`: prompts looked at, picked by hash; 0: all of them.
    """
    prompts: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        prompts.setdefault(conversation.source_id, []).append(conversation)
    chosen = picked(prompts, sample)
    faults, count, tokens, spans = [], 0, 0, 0
    for prompt_id in chosen:
        answers: list[list[int]] = []
        for place, row in enumerate(sorted(prompts[prompt_id], key=lambda row: row.row)):
            if row.answers == "target":
                fault = fault_of(row, render, answers, end_ids)
            else:
                fault = recorded_fault(row, place, recorded)
            if fault:
                faults.append(f"{row.prompt_id}: {fault}")
            answers += [row.input_ids[span.start : span.stop] for span in row.spans]
            count, tokens, spans = count + 1, tokens + len(row.input_ids), spans + len(row.spans)
    measured = {"rows": float(count), "offenders": float(len(faults))}
    if not count:
        return GateResult(NAME, False, "not run: no conversations", measured)
    of = f" (of {len(conversations)}, a sample)" if len(chosen) < len(prompts) else ""
    if faults:
        return GateResult(NAME, False, f"{len(faults)} of {count} rows{of}: {shown(faults)}", measured)
    several = f", {spans} answers" if spans > count else ""
    detail = f"{count} rows{of}{several}, {tokens} ids: prompt render + generated ids, all equal"
    if any(row.answers != "target" for row in conversations):
        detail += "; answers: data set"
    return GateResult(NAME, True, detail, measured)


def picked(names: Collection[str], sample: int) -> list[str]:
    """All names, or `sample` of them by hash: the same ones every time."""
    if not sample or len(names) <= sample:
        return list(names)
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:sample]


def fault_of(
    row: Conversation, render: Callable[..., list[int]], before: Sequence[list[int]], end_ids: Collection[int]
) -> str | None:
    """What is wrong with a row, or None. `before` are the generated ids of the prompt's earlier rows."""
    answers = list(before)
    mask = [False] * len(row.input_ids)
    for number, span in enumerate(row.spans):
        try:
            rendered = render(row.source_id, answers) if answers else render(row.source_id)
        except (KeyError, ValueError):
            return "its prompt cannot be rendered"
        where = "" if len(row.spans) == 1 else f"answer {number + 1}: "
        if fault := span_fault(row, span, rendered, end_ids):
            return where + fault
        mask[span.start : span.stop] = [True] * (span.stop - span.start)
        answers.append(row.input_ids[span.start : span.stop])
    if list(row.loss_mask) != mask or row.spans[-1].stop != len(row.input_ids) or row.spans[0].start != row.prompt_length:
        return "loss mask is not exactly the generated ids"
    if row.turns and (row.digest != ids_digest(supervised(row)) or row.finish_reason != row.turns[-1].finish_reason):
        return "digest or finish reason of the row is not that of its answers"
    return None


def span_fault(row: Conversation, span: Turn, rendered: list[int], end_ids: Collection[int]) -> str | None:
    """What is wrong with one answer of a row, or None."""
    ids, cut = row.input_ids, span.start
    if cut != len(rendered) or ids[:cut] != rendered:
        place = next(
            (i for i, (a, b) in enumerate(zip(ids[:cut], rendered, strict=False)) if a != b), min(cut, len(rendered))
        )
        return f"prompt ids differ from the rendered prompt at {place} ({cut} and {len(rendered)} ids)"
    generated = ids[cut : span.stop]
    if not generated:
        return "no generated ids"
    if ids_digest(generated) != span.digest:
        return "generated ids are not the ones the engine emitted (digest differs): decoded and re-encoded?"
    early = next((place for place, token in enumerate(generated[:-1]) if token in end_ids), None)
    if early is not None:
        return f"end token {generated[early]} at {cut + early}, before the end"
    ended = generated[-1] in end_ids
    if span.finish_reason == "stop" and not ended:
        return f"finished by an end token, but its last id is {generated[-1]}"
    if span.finish_reason == "length" and ended:
        return f"cut by the limit, but its last id {generated[-1]} is an end token"
    if span.finish_reason not in ("stop", "length"):
        return f"finish reason {span.finish_reason!r} is unknown"
    return None


def recorded_fault(row: Conversation, place: int, recorded: Recorded | None) -> str | None:
    """What is wrong with a row of the data set's answers: it is the template's own render, by id."""
    try:
        rows = recorded(row.source_id) if recorded else []
    except (KeyError, ValueError):
        return "its conversation cannot be rendered"
    if place >= len(rows):
        return f"the render of its conversation has {len(rows)} rows"
    if rows[place] != (list(row.input_ids), list(row.loss_mask)):
        return "ids or mask differ from the rendered conversation"
    return None


def shard_identity(stored: Iterable[Stored], conversations: Mapping[str, Conversation]) -> GateResult:
    """Compares ids and mask of rows read back from shards with the conversations, which the rest of the gate has proved.

    A stored row may be shorter: capture cuts long ones. Rows that the run has left since are passed over.
    """
    faults, rows, files = [], 0, set()
    for file, name, ids, mask in stored:
        row = conversations.get(name)
        if row is None:
            continue
        rows += 1
        files.add(file)
        if not ids or ids != list(row.input_ids[: len(ids)]):
            faults.append(f"{file}, {name}: its ids are not the conversation's")
        elif mask != list(row.loss_mask[: len(mask)]) or len(mask) != len(ids):
            faults.append(f"{file}, {name}: its mask is not the conversation's")
    measured = {"stored_rows": float(rows), "shards": float(len(files)), "stored_offenders": float(len(faults))}
    if not rows:
        return GateResult(NAME, False, "not run on shards: they hold no row of this run", measured)
    if faults:
        return GateResult(NAME, False, f"{len(faults)} of {rows} stored rows: {shown(faults)}", measured)
    return GateResult(NAME, True, f"{rows} rows of {len(files)} shards as regen left them", measured)


def joined(first: GateResult, second: GateResult) -> GateResult:
    """Both halves as one gate."""
    detail = "; ".join(half.detail for half in (first, second) if not half.passed) or f"{first.detail}; {second.detail}"
    return GateResult(NAME, first.passed and second.passed, detail, {**first.measured, **second.measured})


def supervised(row: Conversation) -> list[int]:
    return [token for token, mine in zip(row.input_ids, row.loss_mask, strict=True) if mine]


def shown(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more
