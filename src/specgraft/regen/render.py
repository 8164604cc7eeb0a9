"""Messages as token ids, through the target's own chat template, and which of them the target would have written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from specgraft.records import Prompt
from specgraft.regen.messages import Calls, Message, Tools, lessened, normal_messages, normal_tools, reasoning_of
from specgraft.regen.spans import Row, Span, answer_span, begins_with, common_prefix, rows_of

__all__ = ["Chat", "Row", "render"]

REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what a template can do
# Templates that print the day would render another prompt tomorrow. A macro of that name takes the place of the function.
TODAY = {"%Y": "2025", "%y": "25", "%m": "01", "%d": "15", "%-d": "15", "%B": "January", "%b": "Jan", "%A": "Wednesday", "%a": "Wed",
         "%H": "12", "%M": "00", "%S": "00", "%I": "12", "%p": "PM", "%j": "015"}  # fmt: skip
PINNED = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f" | replace({key!r}, {value!r})" for key, value in sorted(TODAY.items(), key=lambda item: -len(item[0])))
    + " -}}{%- endmacro -%}"
)

PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "d", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
BAD_CALL = ('\\"', "{'", "None", "undefined")  # arguments quoted twice, printed as Python, content that is not there


class Chat:
    """The target's chat template under one setting of thinking.

    `end_ids` are the target's end tokens. `thinking` "on" and "off" set the template's own switch (enable_thinking, or thinking);
    "template" leaves its default. Raises ValueError where the template has no such switch, or there is no template.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], thinking: str = "template") -> None:
        self.tokenizer, self.end_ids, self.thinking = tokenizer, frozenset(end_ids), thinking
        self._known_blocks: dict[str, bool] = {}
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template: add chat_template.jinja to its folder")
        if thinking != "template" and not self.switch:
            raise ValueError(
                f'regen.thinking="{thinking}": the target\'s chat template has no such switch (enable_thinking): set it to "template"'
            )

    @cached_property
    def digest(self) -> str:
        """Of the template's text and the setting; answers made under another digest are not mixed with these."""
        text = json.dumps([self.tokenizer.chat_template, self.thinking, TODAY], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids with the generation prompt behind. Raises ValueError, in one line, where the template refuses the messages."""
        ids = self._ids(messages, tools, self.thinking, True)
        if not ids:
            raise ValueError("the chat template renders nothing: change or remove the prompt")
        return ids

    def answered(self, messages: Sequence[Message], tools: Tools = None) -> list[Row]:
        """Recorded answers as rows of ids and mask, by the span rule: what the render has behind the generation prompt.

        Usually one row; more where the template rewrites earlier turns. What follows the last answer is left out. Raises ValueError,
        in one line, where the template refuses the messages or no answer is rendered as the target would have written it.
        """
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise ValueError("no assistant turn: nothing to learn from")
        if turns[0] == 0:
            raise ValueError("the conversation opens with the assistant: there is no prompt to answer")
        found = [self._span(messages, tools, turn) for turn in turns]
        spans = [span for span in found if isinstance(span, Span)]
        if not spans:
            raise ValueError(
                f'no supervised token: the chat template {found[0]} (message {turns[0]}): let the target answer (regen.answers="target")'
            )
        return rows_of(spans, self.end_ids)

    def _span(self, messages: Sequence[Message], tools: Tools, turn: int) -> Span | str:
        """The answer in its own render; or what the template does instead of rendering it as it was written."""
        for mode in self._modes(messages[turn]):
            whole = self._ids(messages[: turn + 1], tools, mode, False)
            prompt = self._ids(messages[:turn], tools, mode, True)
            if not begins_with(whole, prompt):
                continue
            for what, less in lessened(messages[turn]):
                if self._ids([*messages[:turn], less], tools, mode, False) == whole:
                    return f"drops the recorded {what}"
            block = self._empty_block(messages[: turn + 1], tools, mode, prompt, whole)
            span = answer_span(turn, whole, len(prompt) + block, self.end_ids, self.closing, self.special)
            return span or "renders nothing of an answer"
        return "does not render the answer behind its own generation prompt"

    def _empty_block(self, messages: Sequence[Message], tools: Tools, mode: str, prompt: list[int], whole: list[int]) -> int:
        """Tokens of the think block without content that the template puts behind the generation prompt of an answer without reasoning.

        Found out by rendering the answer with other content and with reasoning. What the target writes itself before its text
        (a channel, a recipient) is no such block: reasoning comes before it in a turn of its own.
        """
        message = messages[-1]
        if reasoning_of(message) or (len(messages) > 2 and not self._blocks(mode)):
            return 0
        other = {"role": "assistant", "content": "Z" if str(message.get("content") or "").strip()[:1] == "Q" else "Q"}
        plain = self._ids([*messages[:-1], other], tools, mode, False)
        block = common_prefix(whole, plain) - len(prompt)
        if block <= 0:
            return 0
        if "".join(self.tokenizer.decode(whole[len(prompt) : len(prompt) + block]).split()) == "<think></think>":
            return block  # also of a template that prints no reasoning at all
        reasoned = self._ids([*messages[:-1], {**other, "reasoning_content": "r"}], tools, mode, False)
        if reasoned == plain or not begins_with(reasoned, prompt):
            return 0
        tail = plain[len(prompt) :]
        opening = prompt[len(self._ids(messages[:-1], tools, mode, False)) :]
        before = reasoned[len(prompt) : len(reasoned) - len(tail)]
        own_turn = reasoned[len(reasoned) - len(tail) :] == tail and opening and before[-len(opening) :] == opening
        return 0 if own_turn else block

    def _blocks(self, mode: str) -> bool:
        """Whether this template writes think blocks without content at all."""
        if mode not in self._known_blocks:
            ask: list[Message] = [{"role": "user", "content": "x"}]
            messages = [*ask, {"role": "assistant", "content": "yes"}]
            try:
                whole, prompt = self._ids(messages, None, mode, False), self._ids(ask, None, mode, True)
                self._known_blocks[mode] = begins_with(whole, prompt) and self._empty_block(messages, None, mode, prompt, whole) > 0
            except ValueError:
                self._known_blocks[mode] = True  # this template refuses so short a conversation: every answer is looked at
        return self._known_blocks[mode]

    def _modes(self, message: Message) -> list[str]:
        """Settings of thinking under which this answer can have been written, the likeliest first.

        An answer without reasoning is one of thinking off: the empty block belongs to the prompt then, not to the answer.
        """
        if not self.switch:
            return ["template"]
        found = [self.thinking, "on"] if reasoning_of(message) else ["off", self.thinking]
        return list(dict.fromkeys(found))

    @cached_property
    def switch(self) -> bool:
        """Whether the template knows thinking on and off."""
        ask = [{"role": "user", "content": "x"}]
        try:
            return self._ids(ask, None, "on", True) != self._ids(ask, None, "off", True)
        except ValueError:
            return False

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def closing(self) -> list[int]:
        """Ids that end every assistant turn, whatever it says."""
        try:
            one, two = (
                self._ids([{"role": "user", "content": "x"}, {"role": "assistant", "content": text}], None, self.thinking, False)
                for text in ("yes", "no, 7")
            )
        except ValueError:
            return []
        same = 0
        while same < min(len(one), len(two)) and one[-1 - same] == two[-1 - same]:
            same += 1
        return one[len(one) - same :]

    @cached_property
    def calls(self) -> Calls:
        """How this template prints tool calls. Raises ValueError where it prints none: the calls of a row would be lost."""
        refusals = []
        for calls in (Calls(True, False), Calls(True, True), Calls(False, False), Calls(False, True)):
            try:
                texts = [self._probe(calls, number) for number in ("71", "72")]
            except ValueError as error:
                refusals.append(str(error).partition("; roles:")[0].partition("refuses it (")[2])
                continue
            if texts[0] != texts[1] and not any(mark in texts[0] for mark in BAD_CALL):
                return calls
        what = f"refuses tool calls ({refusals[-1]})" if len(refusals) == 4 else "prints no tool calls, they would be lost"
        raise ValueError(f"the target's chat template {what}: leave out conversations with tool calls")

    def _probe(self, calls: Calls, number: str) -> str:
        """Text of a conversation whose tool call has this number for its argument."""
        call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": f'{{"n": {number}}}'}}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "y", "name": "probe", "tool_call_id": "probe0001"},
        ]
        return str(self._apply(normal_messages(messages, calls), [PROBE_TOOL], self.thinking, True, tokenize=False))

    def _ids(self, messages: Sequence[Message], tools: Tools, mode: str, open_turn: bool) -> list[int]:
        called = any(message.get("tool_calls") for message in messages)
        normal = normal_messages(messages, self.calls if called else Calls())
        return list(self._apply(normal, normal_tools(tools), mode, open_turn, tokenize=True))

    def _apply(self, messages: list[Message], tools: list[dict[str, Any]] | None, mode: str, open_turn: bool, tokenize: bool) -> Any:
        switch = {} if mode == "template" else {"enable_thinking": mode == "on", "thinking": mode == "on"}
        try:
            template = self.tokenizer.get_chat_template(None, tools)
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=PINNED + template if "strftime_now" in template else template,
                tools=tools,
                add_generation_prompt=open_turn,
                tokenize=tokenize,
                return_dict=False,
                **switch,
            )
        except REFUSALS as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            reason = " ".join(str(error).split())
            raise ValueError(f"the target's chat template refuses it ({reason}; roles: {roles}): change or remove the prompt") from None


def render(tokenizer: Any, prompt: Prompt, max_tokens: int, thinking: str = "template") -> list[int]:
    """Token ids of the prompt with the generation prompt behind it.

    Raises ValueError, in one line naming the prompt, when the template refuses it or it is longer than `max_tokens`.
    """
    try:
        ids = Chat(tokenizer, (), thinking).prompt(prompt.messages, prompt.tools)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from None
    if len(ids) > max_tokens:
        raise ValueError(
            f"prompt {prompt.id}: {len(ids)} tokens, prompts.max_tokens allows {max_tokens}: shorten it or raise the limit"
        )
    return ids
