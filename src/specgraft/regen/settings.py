"""What answers depend on, kept beside them: other settings are not mixed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specgraft.config import RegenSection, RunConfig
from specgraft.regen.render import Chat
from specgraft.run_dir import read_json, write_json
from specgraft.targets.model import Target
from specgraft.targets.text import TextTarget, text_identity, tokenizer_digest

# batch and group decide which rows share a pass, and with it the last bits of their logits
KEPT = ("temperature", "greedy_share", "top_p", "top_k", "max_new_tokens", "by_domain", "thinking", "answers")
KEPT_IN_PROCESS = (*KEPT, "batch", "group")


def settings(config: RunConfig, target: Target | TextTarget, chat: Chat | None = None) -> dict[str, Any]:
    """What the answers depend on; kept beside them, and compared when a run goes on."""
    part = config.regen
    chat = chat or Chat(target.tokenizer, target.end_ids, part.thinking)
    keep = KEPT if part.servers else KEPT_IN_PROCESS
    return {
        "target": _identity(target),
        "regen": {key: value for key, value in part.model_dump(mode="json").items() if key in keep},
        "seed": config.run.seed,
        "source": config.prompts.source,
        "held_out_share": config.prompts.held_out_share,
        "template": chat.digest,
        "tokenizer": tokenizer_digest(target.tokenizer),
        "answered": "by servers" if part.servers else "in process",
    }


def _identity(target: Target | TextTarget) -> dict[str, str]:
    if isinstance(target, TextTarget):
        return text_identity(target)
    from specgraft.targets.load import identity

    return identity(target)


def check_settings(path: Path, now: dict[str, Any], what: str, any_there: bool) -> None:
    """Writes `now` where nothing is there yet; refuses to mix with answers of another target or other settings.

    What an older file does not name was as by default.
    """
    if not any_there:
        write_json(path, now)
        return
    before = read_json(path)
    for key, value in now.items():
        there: Any
        if key == "regen":
            usual = RegenSection().model_dump(mode="json")
            there = {name: before.get("regen", {}).get(name, usual.get(name)) for name in value}
        else:
            there = before.get(key, value if key in ("template", "tokenizer") else "in process" if key == "answered" else None)
        if there != value:
            raise ValueError(
                f"{path.parent}: holds {what} made with another `{key}`; use another run.name, or delete that folder ({_apart(there, value)})"
            )


def _apart(there: Any, here: Any) -> str:
    """The first difference, short."""
    if isinstance(there, dict) and isinstance(here, dict):
        name = next(name for name in sorted({*there, *here}) if there.get(name) != here.get(name))
        return f"{name}: {_short(there.get(name))} there, {_short(here.get(name))} now"
    return f"{_short(there)} there, {_short(here)} now"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}.."
