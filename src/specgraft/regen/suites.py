"""Benchmark prompts as token ids: files of prompts or recorded histories, through the target's chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specgraft.config import SourceSection
from specgraft.log import say
from specgraft.records import Prompt
from specgraft.regen.render import Chat
from specgraft.regen.sources import read_source


def suite_prompts(path: str, chat: Chat, count: int, longest: int) -> list[tuple[str, list[int]]]:
    """The first `count` prompts of a suite that fit `longest` tokens: id and ids of each.

    A recorded history gives one prompt: what stands before its last assistant turn that fits. Further user turns of a dialogue
    are left out, as their answers are not there. Raises ValueError where no prompt fits or the file cannot be read.
    """
    found: list[tuple[str, list[int]]] = []
    passed = 0
    for prompt in read_source(SourceSection(path=path, name="")).prompts:
        if len(found) == count:
            break
        ids = next((ids for ids in _renders(chat, prompt) if len(ids) <= longest), None)
        if ids is None:
            passed += 1
        else:
            found.append((prompt.id, ids))
    if not found:
        raise ValueError(f"{path}: no prompt of at most {longest} tokens: raise bench.prompt_tokens")
    if passed:
        say(f"{path}: {passed} prompts are longer than {longest} tokens, or the template refuses them; passed over")
    return found


def _renders(chat: Chat, prompt: Prompt) -> Iterator[list[int]]:
    """Renders of the prompt, the longest history first."""
    messages: list[dict[str, Any]] = list(prompt.messages)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turn = next((number for number, message in enumerate(messages) if message["role"] in ("user", "tool")), 0)
    for end in reversed(answers or [turn + 1]):
        try:
            yield chat.prompt(messages[:end], list(prompt.tools))
        except ValueError:
            continue
