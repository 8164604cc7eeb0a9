"""Gate "token identity": what is trained on is what the engine read and wrote, id by id."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specgraft.records import Conversation, GateResult, ids_digest

SHOWN = 3  # offenders named


def token_identity(
    conversations: Sequence[Conversation], render: Callable[[str], list[int]], end_ids: Collection[int]
) -> GateResult:
    """Compares every conversation with a fresh render of its prompt and with the digest taken when it was generated.

    `render` gives the prompt's ids by prompt id (the target's chat template, called anew). Text that was decoded and
    re-encoded has another digest even where it reads the same.
    """
    faults = []
    for conversation in conversations:
        try:
            rendered: list[int] | None = render(conversation.prompt_id)
        except (KeyError, ValueError):
            rendered = None
        if fault := fault_of(conversation, rendered, end_ids):
            faults.append(f"{conversation.prompt_id}: {fault}")
    count = len(conversations)
    measured = {"rows": float(count), "offenders": float(len(faults))}
    if not count:
        return GateResult("token identity", False, "not run: no conversations", measured)
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return GateResult(
            "token identity", False, f"{len(faults)} of {count} rows: {'; '.join(faults[:SHOWN])}{more}", measured
        )
    tokens = sum(len(c.input_ids) for c in conversations)
    return GateResult(
        "token identity", True, f"{count} rows, {tokens} ids: prompt render + generated ids, all equal", measured
    )


def fault_of(conversation: Conversation, rendered: list[int] | None, end_ids: Collection[int]) -> str | None:
    """What is wrong with a row, or None."""
    ids, mask, cut = conversation.input_ids, conversation.loss_mask, conversation.prompt_length
    if rendered is None:
        return "its prompt cannot be rendered"
    if cut != len(rendered) or ids[:cut] != rendered:
        place = next(
            (i for i, (a, b) in enumerate(zip(ids[:cut], rendered, strict=False)) if a != b), min(cut, len(rendered))
        )
        return f"prompt ids differ from the rendered prompt at {place} ({cut} and {len(rendered)} ids)"
    generated = ids[cut:]
    if not generated:
        return "no generated ids"
    if ids_digest(generated) != conversation.digest:
        return "generated ids are not the ones the engine emitted (digest differs): decoded and re-encoded?"
    if list(mask) != [False] * cut + [True] * len(generated):
        return "loss mask is not exactly the generated ids"
    early = next((place for place, token in enumerate(generated[:-1]) if token in end_ids), None)
    if early is not None:
        return f"end token {generated[early]} at {cut + early}, before the end"
    ended = generated[-1] in end_ids
    if conversation.finish_reason == "stop" and not ended:
        return f"finished by an end token, but its last id is {generated[-1]}"
    if conversation.finish_reason == "length" and ended:
        return f"cut by the limit, but its last id {generated[-1]} is an end token"
    if conversation.finish_reason not in ("stop", "length"):
        return f"finish reason {conversation.finish_reason!r} is unknown"
    return None
