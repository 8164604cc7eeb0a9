"""Reading a run file: TOML, dotted overrides, unknown keys refused by name with the nearest known one. Loads no torch."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specgraft.config import RunConfig, SamplingSection


def parse_override(text: str) -> tuple[list[str], Any]:
    """`train.lr=3e-4` -> (["train", "lr"], 0.0003). The value is TOML; what is no TOML value is taken as a string."""
    key, sep, raw = text.partition("=")
    if not sep or not key.strip():
        raise ValueError(f"override {text!r}: write section.key=value, for example train.lr=3e-4")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads a run file and applies overrides. Raises `ValueError` with one line a user can act on."""
    data: dict[str, Any] = {}
    where = "defaults"
    if path is not None:
        where = str(path)
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such run file; `specgraft pilot` needs none, recipes/ holds examples") from None
        except IsADirectoryError:
            raise ValueError(f"{path}: is a folder; give the run file itself (a .toml)") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of a run file") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is not UTF-8 text") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
    for text in overrides:
        keys, value = parse_override(text)
        node: Any = data
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"override {text!r}: {key} is not a section")
        node[keys[-1]] = value
    return validate(data, where)


def read_arguments(arguments: list[str] | None, default: Path | None = None) -> RunConfig:
    """Run file and overrides from a command line. Raises ValueError for a second run file."""
    given = list(arguments or [])
    paths = [text for text in given if "=" not in text]
    if len(paths) > 1:
        raise ValueError(f"two run files given, {paths[0]} and {paths[1]}: give one; overrides are section.key=value")
    return load_config(paths[0] if paths else default, [text for text in given if "=" in text])


def validate(data: dict[str, Any], where: str) -> RunConfig:
    """Validates a parsed run file; the first fault becomes one line naming the key and what to do."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        location = [str(part) for part in first["loc"]]
        # pydantic adds the union member to the path; keep only keys the user wrote
        keys = [part for part in location if part.isidentifier() and not part.startswith("literal")]
        dotted = ".".join(_known_prefix(keys, data))
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{where}: unknown key `{'.'.join(keys)}`{_nearest(keys)}") from None
        message = first["msg"].removeprefix("Value error, ")
        value = "" if first["type"] == "value_error" else f" (given: {json.dumps(first['input'], default=str)})"
        name = "" if not dotted or message.startswith(f"{dotted}.") else f"{dotted}: "
        raise ValueError(f"{where}: {name}{message}{value}") from None


def _known_prefix(keys: list[str], data: dict[str, Any]) -> list[str]:
    kept: list[str] = []
    node: Any = data
    for key in keys:
        if not isinstance(node, dict) or key not in node:
            break
        kept.append(key)
        node = node[key]
    return kept or keys


def _nearest(keys: list[str]) -> str:
    """Names the nearest known key: in the same section first, then one of that name anywhere, then a section."""
    sections: dict[str, list[str]] = {}
    for name, info in RunConfig.model_fields.items():
        section = info.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        sections[name] = list(section.model_fields)
    head, leaf = keys[0], keys[-1]
    own = sections.get(head, [])
    if keys[:2] == ["regen", "by_domain"] and len(keys) == 4:
        close = difflib.get_close_matches(leaf, list(SamplingSection.model_fields), n=1, cutoff=0.4)
        return f"; did you mean `{'.'.join([*keys[:3], close[0]])}`?" if close else f"; known there: {', '.join(SamplingSection.model_fields)}"
    by_leaf = {key: f"{name}.{key}" for name, known in reversed(sections.items()) for key in known}  # the first section that has it
    by_name = {name: name for name in sections}
    if own and leaf in by_leaf:  # the right key in the wrong section
        return f"; did you mean `{by_leaf[leaf]}`?"
    for known in ({key: f"{head}.{key}" for key in own}, by_name if not own else {}, by_leaf):
        if close := difflib.get_close_matches(leaf if known is not by_name else head, list(known), n=1, cutoff=0.6):
            return f"; did you mean `{known[close[0]]}`?"
    return f"; known here: {', '.join(f'{head}.{key}' for key in own) or ', '.join(sections)}"
