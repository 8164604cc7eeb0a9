"""Where a long conversation is cut, and which rows are left out because nothing could be learnt from them.

A token is an anchor where it and the next one are supervised (decoding never drafts from a prompt token).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from specgraft.records import Conversation, Turn, ids_digest

NO_TOKEN, NO_ANCHOR = "no supervised token", "no legal anchor"


def fault_of_mask(loss_mask: Sequence[bool]) -> str | None:
    """Why a row with this mask [T] teaches nothing, or None."""
    if not any(loss_mask):
        return NO_TOKEN
    if not any(here and behind for here, behind in pairwise(loss_mask)):
        return NO_ANCHOR
    return None


def cut_place(loss_mask: Sequence[bool], max_length: int) -> int:
    """Tokens kept of a row with this mask [T]: all of them, or as many as `max_length` (0: no limit) allows.

    The row ends behind the last answer that fits. Where the answers that fit hold no anchor, or none fits, it ends inside one.
    """
    if not max_length or len(loss_mask) <= max_length:
        return len(loss_mask)
    for place in range(max_length, 0, -1):
        if loss_mask[place - 1] and not loss_mask[place]:
            return max_length if fault_of_mask(loss_mask[:place]) else place
    return max_length


def shortened(conversations: Sequence[Conversation], max_length: int) -> tuple[list[Conversation], dict[str, str]]:
    """The rows that capture sees, cut to `max_length` tokens (0: no limit), and why others are left out, by prompt id."""
    rows: list[Conversation] = []
    left_out: dict[str, str] = {}
    for conversation in conversations:
        place = cut_place(conversation.loss_mask, max_length)
        mask = conversation.loss_mask[:place]
        if fault := fault_of_mask(mask):
            left_out[conversation.prompt_id] = fault
        elif place < len(conversation.input_ids):
            rows.append(cut(conversation, place))
        else:
            rows.append(conversation)
    return rows, left_out


def cut(conversation: Conversation, place: int) -> Conversation:
    """The first `place` tokens of a row, which hold at least one answer or a part of one."""
    ids, mask = conversation.input_ids[:place], conversation.loss_mask[:place]
    spans = [span for span in conversation.spans if span.start < place]
    last = spans[-1]
    if last.stop > place:  # cut inside this answer: no end token is added
        last = Turn(last.start, place, "length", ids_digest(ids[last.start :]))
    return dataclasses.replace(
        conversation, input_ids=ids, loss_mask=mask, finish_reason=last.finish_reason,
        digest=ids_digest([token for token, mine in zip(ids, mask, strict=True) if mine]),
        turns=(*spans[:-1], last) if len(spans) > 1 else (),
    )  # fmt: skip
