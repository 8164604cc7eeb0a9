"""One record of a source -> Prompt. Known shapes: messages (OpenAI), conversations (ShareGPT), instruction and input (Alpaca), prompt, turns.

Every fault is a ValueError that says what is wrong and what to do, without the place: the reader knows file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from specgraft.records import Prompt
from specgraft.regen.messages import REASONING

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"}  # the shape's own names; any other foreign name needs an alias in the run file


def parse_line(line: str | bytes, **defaults: Any) -> Prompt:
    """The prompt of one JSON line; `defaults` as in `parse_record`."""
    try:
        record = json.loads(line.decode("utf-8-sig") if isinstance(line, bytes) else line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ValueError(f"bad JSON ({what}); write one JSON object per line") from None
    return parse_record(record, **defaults)


def parse_record(record: Any, roles: Mapping[str, str] | None = None, language: str = "", domain: str = "") -> Prompt:
    """The prompt of one record.

    `roles` maps foreign role names to ours; `language` and `domain` stand in where the record names none (else "und", "chat").
    Optional in the record: id (else from the content), family (else the id), tools (list, or that list as a JSON string), system.
    """
    require(isinstance(record, dict), 'not a JSON object; write {"messages": [...]}')
    messages = _parse_messages(_messages_of(record, roles or {}))
    tools = _parse_tools(record.get("tools"))
    texts = {}
    for key in ("id", "family", "language", "domain"):
        value = record.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and key in ("id", "family"):
            value = str(value)
        require(
            value is None or (isinstance(value, str) and value.strip() != ""),
            f"{key} is {_short(value)}; give a non-empty string or leave it out",
        )
        require(
            value is None or value.isprintable(),  # half a surrogate pair is not; names appear in messages of one line
            f"{key} {_short(value)} holds a line break or another unprintable character; use plain text",
        )
        texts[key] = value
    name = texts["id"] or f"prompt-{content_id(messages, tools)}"
    return Prompt(
        name, texts["family"] or name, texts["language"] or language or "und", texts["domain"] or domain or "chat", messages, tools
    )


def content_id(messages: Any, tools: Any) -> str:
    """A name for a prompt that depends on its messages and tools alone."""
    try:
        content = json.dumps([list(messages), list(tools)], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, RecursionError):
        raise ValueError("the messages hold values that are no JSON; use strings, numbers, lists and objects") from None
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _messages_of(record: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
    """The record's messages in OpenAI form, whatever its shape; checked by the caller."""
    if record.get("messages") is not None:
        messages = _renamed(record["messages"], "role", "content", roles)
    elif record.get("conversations") is not None:
        messages = _renamed(record["conversations"], "from", "value", {**SHAREGPT, **roles})
    elif record.get("instruction") is not None:
        asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
        require(all(isinstance(text, str) for text in asked), "instruction and input must be strings; write the text itself")
        messages = _exchange("\n\n".join(asked), record.get("output"))
    elif isinstance(record.get("prompt"), list):
        messages = _renamed(record["prompt"], "role", "content", roles)
    elif record.get("prompt") is not None:
        messages = _exchange(record["prompt"], record.get("completion"))
    elif isinstance(record.get("turns"), list):
        messages = [{"role": "user", "content": text} for text in record["turns"]]
    else:
        require("input_ids" not in record, "token ids without messages; give messages, as ids alone cannot be held against the target's template")
        require(False, 'no messages; give "messages": [{"role": "user", "content": "..."}]')
    system = record.get("system")
    if isinstance(system, str) and system.strip() and isinstance(messages, list):
        has = any(isinstance(message, dict) and message.get("role") == "system" for message in messages)
        require(not has, "a system text beside messages that hold one; keep one of them")
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _exchange(asked: Any, answer: Any) -> list[dict[str, Any]]:
    """A question, with its recorded answer behind it where there is one."""
    return [{"role": "user", "content": asked}, *([{"role": "assistant", "content": answer}] if answer else [])]


def _renamed(messages: Any, role: str, content: str, roles: Mapping[str, str]) -> Any:
    """Messages with keys `role` and `content` and our role names. Tables give absent keys as null: those are left out."""
    if not isinstance(messages, list):
        return messages
    return [
        {
            "role": roles.get(name, name) if isinstance(name := message.get(role), str) else name,
            "content": message.get(content),
            **{key: value for key, value in message.items() if key not in (role, content) and value is not None},
        }
        if isinstance(message, dict)
        else message
        for message in messages
    ]


def _parse_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    require(
        isinstance(messages, list) and len(messages) > 0,
        'no messages; give "messages": [{"role": "user", "content": "..."}]',
    )
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        require(isinstance(message, dict), f"{where} is not an object; give role and content")
        role = message.get("role")
        require(
            role in ROLES,
            f"{where} has unknown role {_short(role)}; use one of {', '.join(ROLES)}, or name it in the source's `roles`",
        )
        _check_content(message.get("content"), where)
    first = next((n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), None)
    opening = "user" if first is None else messages[first]["role"]
    require(opening == "user", f"messages[{first}] opens with {opening}; begin with the user turn that it follows")
    last = messages[-1]
    require(
        last["role"] in ("user", "tool", "assistant"),
        f"the last message is from {last['role']}; end with the user turn to be answered",
    )
    said = ("content", "tool_calls", *REASONING) if last["role"] == "assistant" else ("content",)
    require(any(last.get(key) for key in said), "the last message has no content; give the text to be answered")
    return tuple(messages)


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, list):
        kinds = {str(part.get("type", "")) for part in content if isinstance(part, dict)} - {"text"}
        require(not kinds, f"{where} holds {', '.join(sorted(kinds))}; remove images and other media: text only")
        require(False, f"{where} has a list as content; join its text parts into one string")
    require(
        content is None or isinstance(content, str),
        f"{where} has {type(content).__name__} as content; give a string or null",
    )
    require(
        not any("\ud800" <= char <= "\udfff" for char in content or ""),
        f"{where} holds half a surrogate pair; write the character itself",
    )


def _parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError):
            raise ValueError("tools is a string that is not JSON; give the OpenAI function list") from None
    if tools is None:
        return ()
    require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
        "tools is not a list of objects; give the OpenAI function list",
    )
    return tuple(tools)


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:40]


def require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)
