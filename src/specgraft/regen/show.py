"""A conversation with its mask, for the eye: what is supervised, what the template supplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from specgraft.records import Conversation

OPEN, CLOSE = "⟦", "⟧"  # around supervised text where there is no colour


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens that are all supervised, or all not. Filled by `pieces`."""

    text: str
    supervised: bool


def pieces(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[Piece]:
    """Text of the stretches of a mask, special tokens included. For reading only: nothing is trained on decoded text."""
    found = []
    for on, group in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found.append(Piece(text, on))
    return found


def headline(row: Conversation) -> str:
    """One line about a row."""
    ends = ", ".join(f"{span.finish_reason}" for span in row.spans)
    law = "greedy" if row.temperature == 0 else f"T={row.temperature:g}"
    supervised = sum(row.loss_mask)
    return (
        f"{row.prompt_id}  {row.split}, {row.language}, {row.domain}, family {row.family}; {len(row.input_ids)} tokens, "
        f"{supervised} supervised ({supervised / max(len(row.input_ids), 1):.0%}); {len(row.spans)} "
        f"answer{'s' if len(row.spans) > 1 else ''} ({ends}); answers: {row.answers}" + (f", {law}" if row.answers == "target" else "")
    )


def text_of(parts: Sequence[Piece], colour: bool) -> Text:
    """Supervised green, template grey; or plain text with marks."""
    text = Text()
    for part in parts:
        if colour:
            text.append(part.text, "bold green" if part.supervised else "bright_black")
        else:
            text.append(f"{OPEN}{part.text}{CLOSE}" if part.supervised else part.text)
    return text


def print_parts(console: Console, title: str, parts: Sequence[Piece]) -> None:
    """Writes a conversation; in colour on a terminal that has it."""
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    console.print(Text(title, "bold" if colour else ""), soft_wrap=True)
    console.print(text_of(parts, colour), soft_wrap=True)
    console.print()
