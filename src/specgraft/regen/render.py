"""A prompt as token ids, through the target's own chat template."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from specgraft.records import Prompt


def render(tokenizer: Any, prompt: Prompt, max_tokens: int) -> list[int]:
    """Token ids of the prompt with the generation prompt behind it.

    Raises ValueError, in one line naming the prompt, when the template refuses it or it is longer than `max_tokens`.
    """
    try:
        ids = tokenizer.apply_chat_template(
            list(prompt.messages),
            tools=list(prompt.tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # what a template can do
        roles = " ".join(str(message.get("role")) for message in prompt.messages)
        reason = " ".join(str(error).split())
        raise ValueError(
            f"prompt {prompt.id}: the target's chat template refuses it ({reason}; roles: {roles}): change or remove the prompt"
        ) from None
    if not ids:
        raise ValueError(f"prompt {prompt.id}: the chat template renders nothing: change or remove the prompt")
    if len(ids) > max_tokens:
        raise ValueError(
            f"prompt {prompt.id}: {len(ids)} tokens, prompts.max_tokens allows {max_tokens}: shorten it or raise the limit"
        )
    return list(ids)
