"""`export`: a checkpoint -> a folder that a serving engine loads. Checking and renaming, no surgery."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specgraft import __version__
from specgraft.config import RunConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.store import WEIGHTS as CHECKPOINT_WEIGHTS
from specgraft.drafters.store import load_drafter
from specgraft.export.card import model_card
from specgraft.export.contract import WEIGHTS, config_json, expected_tensors
from specgraft.export.facts import TargetFacts, target_facts
from specgraft.export.folder import WRITER, refuse_foreign, replace_folder
from specgraft.export.gguf_file import NAME as GGUF
from specgraft.export.gguf_file import tokenizer_fields
from specgraft.export.gguf_file import write as write_gguf
from specgraft.export.refusals import refuse
from specgraft.export.vocabulary import DraftVocabulary, pruned
from specgraft.log import say
from specgraft.run_dir import RunDir, read_json


def export(
    config: RunConfig, run: RunDir, checkpoint: Path, out: Path | None = None, vocabulary: DraftVocabulary | None = None, target_gguf: str = ""
) -> Path:
    """Writes `out` (`run.export`) from a checkpoint folder and returns it; an older export there is replaced.

    `vocabulary` is there when `export.vocabulary` is set; `target_gguf` where llama.cpp's tokenizer fields are copied from.
    Raises ValueError, in one line, for a drafter that breaks the contract, a folder with foreign files, or a full disk;
    then nothing is written and nothing deleted.
    """
    part, place = config.export, out or run.export
    refuse_foreign(place)
    drafter = load_drafter(checkpoint)
    facts = target_facts(run)
    refuse(drafter.config, part.dtype, part.to, facts, part.vocabulary)
    tensors = contract_tensors(drafter, part.dtype)
    if vocabulary is not None:
        tensors = pruned(tensors, vocabulary)
    made = provenance(config, checkpoint, facts, drafter.config.kind)
    if vocabulary is not None:
        made["draft_vocabulary"] = {"ids": len(vocabulary.ids), "share_of_answer_tokens": round(vocabulary.share, 4)}
    card = model_card(drafter.config, config.target.id, part.to, made, evaluation_of(run, checkpoint))
    llamacpp = part.to == "llamacpp"
    tokenizer = tokenizer_fields(facts.folder or Path(config.target.id), part.target_gguf or target_gguf) if llamacpp else {}

    def fill(folder: Path) -> None:
        file = folder / (GGUF if llamacpp else WEIGHTS)
        if llamacpp:
            write_gguf(file, drafter.config, tensors, part.dtype, tokenizer, vocabulary.ids if vocabulary else None)
        else:
            maps = {} if vocabulary is None else {"d2t": vocabulary.offsets(), "t2d": vocabulary.member(drafter.config.vocab_size)}
            save_file(tensors | maps, file, metadata={"format": "pt"})
            data = config_json(drafter.config, part.dtype, part.vocabulary)
            _write(folder / "config.json", json.dumps(data, indent=2) + "\n")
        made["sha256"] = _sha256(file)
        _write(folder / "provenance.json", json.dumps(made, indent=2, default=str) + "\n")
        file.chmod((folder / "provenance.json").stat().st_mode)  # safetensors lets only the owner read
        _write(folder / "README.md", card)

    replace_folder(place, fill)
    size = sum(tensor.numel() for tensor in tensors.values())
    some = f", {len(vocabulary.ids)} ids ({vocabulary.share:.1%} of the answers' tokens)" if vocabulary else ""
    say(f"export: {len(tensors)} tensors, {size / 1e6:.1f} M parameters in {part.dtype}{some}, for {part.to}: {place}")
    return place


def contract_tensors(drafter: Drafter, dtype: str) -> dict[str, torch.Tensor]:
    """The drafter's weights under the contract's names. Raises ValueError naming a tensor that does not fit."""
    kind = getattr(torch, dtype)
    tensors = {name: tensor.detach().to("cpu", kind).contiguous() for name, tensor in drafter.state_dict().items()}
    wanted = expected_tensors(drafter.config)
    for name in sorted(set(wanted) ^ set(tensors)):
        raise ValueError(
            f"checkpoint: tensor {name} is {'missing' if name in wanted else 'not in the contract'}; train again"
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"checkpoint: tensor {name} is {tuple(tensors[name].shape)}, the contract has {shape}; train again"
            )
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"checkpoint: tensor {name} is not finite in {dtype}; use another checkpoint")
    return tensors


def provenance(config: RunConfig, checkpoint: Path, facts: TargetFacts, kind: str) -> dict[str, Any]:
    """How the export came about: this process, the checkpoint's own record, digests, the resolved run config."""
    import transformers

    state = checkpoint / "state.json"
    record = read_json(state) if state.is_file() else {}
    return {
        "writer": WRITER,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "specgraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "to": config.export.to,
        "layer_ids": "output of decoder layer i, from 0, before any norm",
        "block_size": "number of drafts a round" if kind == "dspark" else "inputs of a block: drafts and the anchor",
        "target": {"id": config.target.id, "weights": facts.weights},
        "checkpoint": str(checkpoint),
        "checkpoint_sha256": _sha256(checkpoint / CHECKPOINT_WEIGHTS),
        "step": record.get("step"),
        "trained": {key: record.get(key) for key in ("settings", "provenance")},
        "config": config.model_dump(),
    }


def evaluation_of(run: RunDir, checkpoint: Path) -> dict[str, Any] | None:
    """evaluate.json when it was measured on this very checkpoint."""
    if not run.evaluation.is_file():
        return None
    found = read_json(run.evaluation)
    return found if found.get("settings", {}).get("weights") == _sha256(checkpoint / CHECKPOINT_WEIGHTS) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
