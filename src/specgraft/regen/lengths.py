"""Length bands of prompts, in characters of all messages: `0-500` holds 0 to 499, `500-` everything from 500."""

from __future__ import annotations

from collections.abc import Iterable

from specgraft.config import band_ends
from specgraft.records import Prompt

ALL = "all"  # the one band of a mix that does not weigh lengths


def characters(prompt: Prompt) -> int:
    """Characters of all messages; calls of tools and the tools themselves are not counted."""
    return sum(len(message.get("content") or "") for message in prompt.messages)


def band_of(length: int, bands: Iterable[str]) -> str | None:
    """The band that holds `length`, or None; `ALL` where there are no bands."""
    named = list(bands)
    if not named:
        return ALL
    for band in named:
        low, high = band_ends(band)
        if low <= length and (high is None or length < high):
            return band
    return None
