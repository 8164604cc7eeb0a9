"""The built-in prompts, written for specgraft: templates and slots, one module per language and domain."""

from __future__ import annotations

from importlib import import_module

from .family import Family, expand

LANGUAGES = ("en", "ko", "ja")
DOMAINS = ("chat", "code", "math", "tool")

__all__ = ["DOMAINS", "LANGUAGES", "Family", "expand", "families"]


def families(language: str, domain: str) -> tuple[Family, ...]:
    """Return the families of one cell, in the order they are written."""
    return tuple(import_module(f"{__name__}.{language}_{domain}").FAMILIES)
