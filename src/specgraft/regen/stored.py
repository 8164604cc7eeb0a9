"""The drawn mix in the run folder: RUN/prompts/train.jsonl, heldout.jsonl, and mix.json with the report and what it was drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from specgraft.config import RunConfig
from specgraft.log import say
from specgraft.records import Prompt
from specgraft.run_dir import RunDir, read_json, write_json, write_text

RULES = 2  # raise it when the same settings and files give another set
GONE = "gone"


def drawn_from(config: RunConfig) -> dict[str, Any]:
    """What the set depends on: the rules, the settings, and a digest of each file; a file that is not there is `GONE`."""
    part = config.prompts
    paths = [source.path for source in part.sources] or [part.source]
    return {
        "rules": RULES,
        "seed": config.run.seed,
        "prompts": part.model_dump(mode="json", exclude={"max_tokens"}),
        "files": {path: _digest(path) for path in sorted({*paths, *part.suites})},
    }


def stored(config: RunConfig, run: RunDir) -> dict[str, list[Prompt]] | None:
    """The prompts kept in the run folder, or None where there are none, or they were drawn from something else.

    A source or suite that is gone (the run was moved to another machine) leaves the kept set as it is, and says so.
    """
    path = run.prompts / "mix.json"
    if not path.exists():
        return None
    before, now = read_json(path), drawn_from(config)
    files, was = now.pop("files"), before.get("drawn_from", {})
    if not all(isinstance(part, dict) for part in (was, before.get("digests", {}), was.get("files", {}) if isinstance(was, dict) else None)):
        raise ValueError(f"{path}: damaged; delete it, and the set is drawn again")
    if {key: was.get(key) for key in now} != now or set(files) != set(was.get("files", {})):
        return None
    gone = [name for name, digest in files.items() if digest == GONE]
    if any(digest not in (GONE, was["files"][name]) for name, digest in files.items()):
        return None
    found = {split: _read(run.prompts / f"{split}.jsonl", digest) for split, digest in before.get("digests", {}).items()}
    if not found or not all(found.values()):
        return None
    if gone:
        _say_gone(str(run.prompts), gone[0])
    return {split: prompts for split, prompts in found.items() if prompts}


def store(config: RunConfig, run: RunDir, prompts: Mapping[str, list[Prompt]], report: Mapping[str, Any]) -> None:
    """Writes the set; mix.json comes last, so that what was killed half-way is drawn again."""
    (run.prompts / "mix.json").unlink(missing_ok=True)
    digests = {}
    for split, some in prompts.items():
        text = "".join(json.dumps(prompt.to_json(), ensure_ascii=False) + "\n" for prompt in some)
        write_text(run.prompts / f"{split}.jsonl", text)
        digests[split] = hashlib.sha256(text.encode()).hexdigest()
    write_json(run.prompts / "mix.json", {"drawn_from": drawn_from(config), "digests": digests, "report": report})


def _read(path: Path, digest: str) -> list[Prompt] | None:
    if not path.exists() or _sha(path) != digest:
        return None
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [Prompt(**{**row, "messages": tuple(row["messages"]), "tools": tuple(row["tools"])}) for row in rows]


def _digest(path: str) -> str:
    if path == "builtin":
        return _builtin_digest()
    if path.startswith("hf:"):
        return "hub"  # what the hub holds by that name; the kept set stands until the settings change
    file = Path(path)
    if not file.is_file():
        return GONE
    about = file.stat()
    return _file_digest(str(file.resolve()), about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=256)
def _file_digest(path: str, size: int, changed: int) -> str:
    return _sha(Path(path))


@lru_cache(maxsize=1)
def _builtin_digest() -> str:
    """Of the files that hold the built-in prompts: another version may hold others."""
    files = sorted((Path(__file__).parent / "builtin").glob("*.py"))
    return hashlib.sha256("".join(_sha(file) for file in files).encode()).hexdigest()


def _sha(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@lru_cache(maxsize=64)
def _say_gone(folder: str, path: str) -> None:
    """Once a process."""
    say(f"{path}: not there any more; the prompts kept in {folder} are used")
