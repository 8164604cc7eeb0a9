"""What the run knows about its target without loading it: the shapes that an export must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specgraft.run_dir import RunDir, read_json


@dataclass(frozen=True)
class TargetFacts:
    """None where the run does not say. Filled by `target_facts`."""

    layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None  # context length
    weights: str | None = None  # sha256 that `capture` took
    model_type: str | None = None  # of its config.json
    folder: Path | None = None  # where it lies, if that is a folder here


def target_facts(run: RunDir) -> TargetFacts:
    """From the features' manifest, and from the target's own config.json where that is a folder here."""
    manifest = run.features / "manifest.json"
    if not manifest.is_file():
        return TargetFacts()
    data = read_json(manifest)
    identity = data.get("target", {})
    own = Path(str(identity.get("id", ""))) / "config.json"
    whole = read_json(own) if own.is_file() else {}
    shape = whole.get("text_config", whole)
    return TargetFacts(
        layers=shape.get("num_hidden_layers"),
        hidden_size=data.get("hidden_size"),
        vocab_size=data.get("vocab_size"),
        max_positions=shape.get("max_position_embeddings"),
        weights=identity.get("weights"),
        model_type=whole.get("model_type"),
        folder=own.parent if own.is_file() else None,
    )
