"""The target as text: tokenizer, end tokens, context, and digests of what makes its ids. No weights are loaded here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TextTarget:
    """A target without its weights: what rendering and answering through servers need. Filled by `load_text`."""

    tokenizer: Any
    end_ids: tuple[int, ...]  # every id that ends an answer
    path: Path  # Hugging Face folder, or hub id
    context: int | None  # tokens; None where its config names no limit
    weights: str  # digest of the weight files of a folder, or the revision of a hub id


def resolve(name: str) -> str:
    """The folder or hub id behind a target name; the embedded target is converted on first use."""
    if name == "smollm2":
        from specgraft.targets.embedded import smollm2_folder

        return str(smollm2_folder())
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")):
        if not (path / "config.json").is_file():
            raise ValueError(f"target.id={name!r}: no config.json there; give a Hugging Face folder or a hub id")
        return str(path)
    return name


def load_text(name: str, remote_code: bool = False) -> TextTarget:
    """The text side of a target. Raises ValueError, in one line, where it cannot be read or has no chat template."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source = resolve(name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # no file of that name: as transformers does for a model
            generation = GenerationConfig.from_model_config(config)
        found = weight_files(Path(source)) if Path(source).is_dir() else str(getattr(config, "_commit_hash", None))
    except (OSError, KeyError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"target.id={name!r} could not be loaded: {first}") from None
    refuse_no_template(name, tokenizer)
    return TextTarget(tokenizer, end_ids(generation.eos_token_id, tokenizer), Path(source), context_of(config), found)


def refuse_no_template(name: str, tokenizer: Any) -> None:
    """Raises ValueError where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(f"target.id={name!r}: the tokenizer has no chat template; add chat_template.jinja to the folder")


def end_ids(generation: int | list[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's eos_token_id (one or a list) and the tokenizer's end of text."""
    found: set[int] = set()
    for source in (generation, tokenizer.eos_token_id):
        if source is not None:
            found.update(source if isinstance(source, list) else [source])
    if not found:
        raise ValueError("the target names no end token: set eos_token_id in its generation_config.json")
    return tuple(sorted(found))


def context_of(config: Any) -> int | None:
    """Tokens that the target reads at most, or None where its config names no limit."""
    inner = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return getattr(inner, "max_position_embeddings", None)


def digest(path: Path) -> str:
    """sha256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            total.update(block)
    return total.hexdigest()


def weight_files(folder: Path) -> str:
    """sha256 over names and contents of a folder's weight files. Raises ValueError where it has none."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")) or sorted(folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"{folder} holds no weight files; the target's own folder is needed, as answers are kept under its digest")
    return hashlib.sha256("".join(f"{path.name} {digest(path)}\n" for path in files).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of all that turns text into ids: vocabulary, merges, normaliser, splitting, added tokens; not only the vocabulary."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None and hasattr(inner, "to_str"):
        rules: Any = json.loads(inner.to_str())
        for passing in ("truncation", "padding"):  # of the last call, not of the tokenizer
            rules.pop(passing, None)
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), sorted((i, str(t)) for i, t in added.items())]
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def template_digest(tokenizer: Any, thinking: str = "template") -> str:
    """sha256 of the chat template's text and the setting of thinking that it is rendered with."""
    text = tokenizer.chat_template
    whole = json.dumps(text, sort_keys=True) if isinstance(text, Mapping) else str(text)
    return hashlib.sha256(f"{thinking}\n{whole}".encode()).hexdigest()


def text_identity(target: TextTarget) -> dict[str, str]:
    """Digests of a target that answers elsewhere: its weight files (the dtype is the server's own), tokenizer, chat template."""
    return {
        "id": str(target.path),
        "weight_files": target.weights,
        "tokenizer": tokenizer_digest(target.tokenizer),
        "chat_template": template_digest(target.tokenizer),
    }
