"""A prompt answered turn by turn, and the rows that come of it.

The prompt of a later turn is a fresh render of the messages with the answers' text in them: that is what a server would get.
Where it begins with the ids so far, the row goes on; where not (the template rewrites earlier turns, or the ids of an answer are
not those of its text), the row is closed and another begins with that render, of which nothing is supervised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgraft.records import Conversation, Prompt, Turn, ids_digest, row_id
from specgraft.regen.messages import Message
from specgraft.regen.render import Chat
from specgraft.regen.sampling import Sampling
from specgraft.regen.spans import begins_with

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|$)", re.S)


def script(prompt: Prompt) -> list[list[Message]]:
    """The messages put before each answer of the target.

    Recorded answers are left out, as the target writes its own. Histories stay as recorded up to the last recorded answer, which
    is left out: those of domain `agent`, and those with tool calls or results, as what follows depends on what was recorded.
    Raises ValueError where there is nothing to answer.
    """
    messages = list(prompt.messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    roles = [message.get("role") for message in messages]
    start = 0
    if is_history(prompt):
        start = max((place + 1 for place, role in enumerate(roles) if role in ("assistant", "tool")), default=0)
    elif next((role for role in roles if role not in ("system", "developer")), None) == "assistant":
        raise ValueError(f"prompt {prompt.id}: opens with the assistant: there is no prompt to answer; remove that turn")
    parts: list[list[Message]] = []
    part = messages[:start]
    for message in messages[start:]:
        if message.get("role") == "assistant":
            continue
        part = [*part, message]
        if message.get("role") == "user":
            parts.append(part)
            part = []
    if part:
        if part[-1].get("role") not in ("tool", "assistant"):
            raise ValueError(f"prompt {prompt.id}: the last message is from {part[-1].get('role')}; end with the turn to be answered")
        parts.append(part)
    if not parts:
        raise ValueError(f"prompt {prompt.id}: no turn to be answered; give a user message")
    return parts


def is_history(prompt: Prompt) -> bool:
    """Whether recorded answers are kept, because what follows them depends on them."""
    return prompt.domain == "agent" or any(m.get("role") == "tool" or m.get("tool_calls") for m in prompt.messages)


def message_of(tokenizer: Any, ids: Sequence[int], end_ids: Collection[int]) -> Message:
    """A generated answer as the message that a server makes of it: text without the end token and other special tokens, reasoning
    (behind `<think>`, or in the analysis channel) apart."""
    kept = list(ids[:-1] if ids and ids[-1] in end_ids else ids)
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "<|channel|>" in text:
        said = CHANNEL.findall(text)
        reasoning = "\n".join(body for channel, body in said if channel == "analysis")
        content = "\n".join(body for channel, body in said if channel != "analysis")
    elif "</think>" in text:
        reasoning, _, content = text.partition("</think>")
        reasoning = reasoning.partition("<think>")[2] if "<think>" in reasoning else reasoning
    else:
        reasoning = ""
        content = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


def turn_prompt(chat: Chat, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
    """Ids of the prompt of the turn behind these answers. Raises ValueError, naming the prompt, where the template refuses it."""
    return _prompt(chat, prompt, [message_of(chat.tokenizer, ids, chat.end_ids) for ids in answers])


def _prompt(chat: Chat, prompt: Prompt, answers: Sequence[Message]) -> list[int]:
    messages: list[Message] = []
    for number, part in enumerate(script(prompt)[: len(answers) + 1]):
        messages += [*part, *answers[number : number + 1]]
    try:
        return chat.prompt(messages, prompt.tools)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from None


@dataclass
class _Row:
    ids: list[int]
    turns: list[Turn] = field(default_factory=list)


class Dialogue:
    """One prompt on its way: `asked` is the rendered turn that waits for its answer (None: through), `hear` takes that answer."""

    def __init__(self, chat: Chat, prompt: Prompt, split: str, sampling: Sampling, max_tokens: int, context: int | None) -> None:
        """Renders the first turn. Raises ValueError, naming the prompt, where the template refuses one of the turns, or the first is
        too long."""
        self.chat, self.prompt, self.split, self.sampling, self.context = chat, prompt, split, sampling, context
        self.turns = len(script(prompt))
        self.answers: list[list[int]] = []
        self.stopped = ""  # why turns were left out
        self._rows: list[_Row] = []
        self.asked: list[int] | None = turn_prompt(chat, prompt, [])
        if self.turns > 1:  # with any answers: what the template refuses is to cost no work
            _prompt(chat, prompt, [{"role": "assistant", "content": "ok"}] * (self.turns - 1))
        if len(self.asked) > max_tokens:
            raise ValueError(
                f"prompt {prompt.id}: {len(self.asked)} tokens, prompts.max_tokens allows {max_tokens}: shorten it or raise the limit"
            )
        if context and (longest := len(self.asked) + sampling.max_new_tokens) > context:
            raise ValueError(
                f"prompt {prompt.id}: prompt and answer may take {longest} tokens, the target's context is {context}: "
                "lower regen.max_new_tokens"
            )

    @property
    def turn(self) -> int:
        """Number of the turn that waits, from 0."""
        return len(self.answers)

    def hear(self, ids: list[int], finish_reason: str) -> None:
        """Takes the answer to `asked` and renders the next turn. Nothing is put behind a cut answer."""
        asked = self.asked
        assert asked is not None and ids
        if not self._rows or not begins_with(asked, self._rows[-1].ids):
            self._rows.append(_Row([]))
        row = self._rows[-1]
        row.turns.append(Turn(len(asked), len(asked) + len(ids), finish_reason, ids_digest(ids)))
        row.ids = asked + ids
        self.answers.append(ids)
        self.asked = None
        if self.turn == self.turns:
            return
        if finish_reason != "stop":
            self.stopped = "behind a cut answer"
            return
        try:
            following = turn_prompt(self.chat, self.prompt, self.answers)
        except ValueError as error:
            self.stopped = str(error)
            return
        if self.context and len(following) + self.sampling.max_new_tokens > self.context:
            self.stopped = "the target's context is full"
            return
        self.asked = following

    def conversations(self) -> list[Conversation]:
        """The rows so far."""
        how = self.sampling
        return [
            row_of(self.prompt, self.split, number, row.ids, row.turns, (how.temperature, how.top_p, how.top_k))
            for number, row in enumerate(self._rows, 1)
        ]


def row_of(
    prompt: Prompt, split: str, number: int, ids: list[int], turns: Sequence[Turn], law: tuple[float, float, int], answers: str = "target"
) -> Conversation:
    """A row of these ids, supervised at `turns`; `law` is temperature, top-p and top-k."""
    mask = [False] * len(ids)
    for turn in turns:
        mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
    return Conversation(
        prompt_id=row_id(prompt.id, number),
        family=prompt.family,
        language=prompt.language,
        domain=prompt.domain,
        split=split,
        input_ids=ids,
        loss_mask=mask,
        prompt_length=turns[0].start,
        temperature=law[0],
        top_p=law[1],
        top_k=law[2],
        finish_reason=turns[-1].finish_reason,
        digest=ids_digest([token for token, mine in zip(ids, mask, strict=True) if mine]),
        row=number,
        turns=tuple(turns) if len(turns) > 1 or turns[0].stop != len(ids) else (),
        answers=answers,
    )


def without_cut(row: Conversation) -> Conversation | None:
    """The row without an answer that was cut at the limit; None where no other is left."""
    kept = [turn for turn in row.spans if turn.finish_reason != "length"]
    if len(kept) == len(row.spans):
        return row
    if not kept:
        return None
    prompt = Prompt(row.source_id, row.family, row.language, row.domain, ())
    law = (row.temperature, row.top_p, row.top_k)
    return row_of(prompt, row.split, row.row, row.input_ids[: kept[-1].stop], kept, law, row.answers)
