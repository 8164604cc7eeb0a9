"""Answers of the data set taken as they are: what training without regeneration would see, kept for comparison."""

from __future__ import annotations

from specgraft.records import Conversation, Prompt, Turn, ids_digest
from specgraft.regen.dialogue import row_of
from specgraft.regen.render import Chat

LABEL = "data set"
LAW = (1.0, 1.0, 0)  # nobody knows how they were sampled; certainly not greedily by the target


def recorded_rows(chat: Chat, prompt: Prompt, split: str, max_tokens: int, context: int | None) -> list[Conversation]:
    """The rows of a prompt's recorded answers, labelled as such. Raises ValueError, naming the prompt, where none can be read."""
    try:
        rows = chat.answered(prompt.messages, prompt.tools)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from None
    found = []
    for number, row in enumerate(rows, 1):
        turns = turns_of(row.ids, row.mask, chat.end_ids)
        ids = row.ids[: turns[-1].stop]
        if turns[0].start > max_tokens:
            raise ValueError(
                f"prompt {prompt.id}: {turns[0].start} tokens, prompts.max_tokens allows {max_tokens}: shorten it or raise the limit"
            )
        if context and len(ids) > context:
            raise ValueError(f"prompt {prompt.id}: {len(ids)} tokens, the target's context is {context}: shorten the conversation")
        found.append(row_of(prompt, split, number, ids, turns, LAW, LABEL))
    return found


def turns_of(ids: list[int], mask: list[bool], end_ids: frozenset[int]) -> list[Turn]:
    """The stretches of a mask, as turns."""
    edges = [place for place in range(len(mask) + 1) if (place < len(mask) and mask[place]) != (place > 0 and mask[place - 1])]
    return [
        Turn(start, stop, "stop" if ids[stop - 1] in end_ids else "length", ids_digest(ids[start:stop]))
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
