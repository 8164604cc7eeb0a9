"""Messages and tools of any source in the one form that chat templates read. Nothing here renders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")  # names under which recorded reasoning comes

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | str | None


@dataclass(frozen=True)
class Calls:
    """How a template wants a message with tool calls: found out by `render.Chat`, as templates do not say."""

    objects: bool = True  # arguments as an object; else as JSON text
    empty: bool = True  # content "" where there is none; else no content at all


PLAIN = Calls()


def normal_tools(tools: Tools) -> list[dict[str, Any]] | None:
    """An OpenAI function list; None where there is none. Raises ValueError for a string that is no JSON list."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise ValueError("tools is a string that is not JSON: give the OpenAI function list") from None
    if not tools:
        return None
    if isinstance(tools, dict) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects: give the OpenAI function list")
    return list(tools)


def normal_messages(messages: Sequence[Message], calls: Calls = PLAIN) -> list[Message]:
    """The messages with content as text, reasoning as `reasoning_content`, tool calls as `calls` says.

    Raises ValueError, in one line, for pictures and other media, and for arguments that are no JSON object.
    """
    return [normal_message(message, f"message {number}", calls) for number, message in enumerate(messages)]


def normal_message(message: Message, where: str, calls: Calls) -> Message:
    found = {key: value for key, value in message.items() if key not in (*REASONING, "tool_calls", "content")}
    found["content"] = text_of(message.get("content"), where)
    if reasoning := _field(message):
        found["reasoning_content"] = found["thinking"] = reasoning  # templates read one or the other
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call, f"{where}, tool call {n}", calls) for n, call in enumerate(message["tool_calls"])]
        if not found["content"] and not calls.empty:
            found["content"] = None
    return found


def reasoning_of(message: Message) -> str:
    """Recorded reasoning of a message, in a field of its own or as a think block at the head of the content; "" where there is none."""
    return _field(message) or _inline(message)[0]


def _field(message: Message) -> str:
    return next((text for key in REASONING if isinstance(text := message.get(key), str) and text), "")


def _inline(message: Message) -> tuple[str, Any]:
    """A think block at the head of the content, and the content behind it."""
    content = message.get("content")
    if isinstance(content, str) and content.lstrip().startswith("<think>") and "</think>" in content:
        block, _, rest = content.partition("</think>")
        return block.lstrip().removeprefix("<think>").strip(), rest
    return "", content


def lessened(message: Message) -> Iterator[tuple[str, Message]]:
    """Parts of an answer that templates are known to drop, each with the message that lacks it."""
    if reasoning_of(message):
        kept = {key: value for key, value in message.items() if key not in REASONING}
        yield "reasoning", {**kept, "content": _inline(message)[1]}
    if calls := message.get("tool_calls"):
        if message.get("content"):
            yield "text beside a tool call", {**message, "content": None}
        if len(calls) > 1:
            yield "second tool call", {**message, "tool_calls": list(calls[:-1])}


def text_of(content: Any, where: str) -> str:
    """Content as one string; text parts are joined by a line break, as servers do. Raises ValueError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        if kinds:
            raise ValueError(f"{where} holds {', '.join(kinds)}: text only, remove pictures and other media")
        return "\n".join(str(part.get("text") or "") for part in content)
    raise ValueError(f"{where} has {type(content).__name__} as content: give a string, text parts or null")


def _call(call: Any, where: str, calls: Calls) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'{where} names no function: give {{"function": {{"name": .., "arguments": ..}}}}')
    arguments = function.get("arguments")
    if calls.objects:
        arguments = _object(arguments, where)
    elif not isinstance(arguments, str):
        arguments = json.dumps(_object(arguments, where), ensure_ascii=False)
    rest = {key: value for key, value in call.items() if key not in ("type", "function", "name", "arguments")}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _object(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError:
            arguments = ""
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments are no JSON object, which the chat template needs: mend or remove the row")
    return arguments
