"""The built-in prompts, written for specgraft: templates and slots, one module per language and domain."""

from __future__ import annotations

from importlib import import_module

from specgraft.regen.builtin.family import Family

LANGUAGES = ("en", "ko", "ja")
DOMAINS = ("chat", "code", "math", "tool")


def families(language: str, domain: str) -> tuple[Family, ...]:
    """Return the families of one cell, in the order they are written."""
    return tuple(import_module(f"{__package__}.{language}_{domain}").FAMILIES)
