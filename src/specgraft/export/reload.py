"""Reads an exported folder back, from its own files alone, as strictly as no engine does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.layouts import zlab
from specgraft.drafters.layouts.files import Fields
from specgraft.drafters.registry import build
from specgraft.export.contract import ARCHITECTURE, WEIGHTS, config_json, expected_tensors
from specgraft.export.gguf_file import NAME as GGUF
from specgraft.export.gguf_file import read as read_gguf
from specgraft.export.vocabulary import widened

REMEDY = "run export again"
MAPS = ("d2t", "t2d")  # of a draft vocabulary; no weights


@dataclass(frozen=True)
class Export:
    """What a folder holds. Filled by `load_export`."""

    drafter: Drafter  # in float32, ready to run; output rows of ids that are never proposed are 0
    dtype: str  # of the file's matrices
    ids: torch.Tensor | None  # [v] target ids that are proposed, or None for all
    head: torch.Tensor | None  # [v, D] the file's rows of the target's head


def load_export(folder: Path) -> Export:
    """Raises ValueError naming the key or tensor that is missing, extra or wrong."""
    ids = None
    if (folder / GGUF).is_file():
        config, tensors, dtype, ids = read_gguf(folder / GGUF)
        if ids is not None:
            absolute = ids
            tensors |= {"d2t": absolute - torch.arange(len(absolute)), "t2d": torch.zeros(config.vocab_size, dtype=torch.bool)}
            tensors["t2d"][absolute] = True
        check_shapes(folder / GGUF, tensors, expected_tensors(config, 0 if ids is None else len(ids)))
    else:
        config, dtype, vocabulary = read_config(folder)
        tensors = read_tensors(folder, config, dtype, vocabulary)
    head = tensors.get("lm_head.weight")
    if head is not None:
        try:
            tensors, ids = widened(tensors, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}; {REMEDY}") from None
    drafter = build(config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return Export(drafter.requires_grad_(False).eval(), dtype, ids, head)


def read_config(folder: Path) -> tuple[DrafterConfig, str, int]:
    """Shape of the drafter, dtype of the file and size of the draft vocabulary (0: all), from config.json. Every key of the
    contract must be there and agree."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        config, dtype = drafter_config(path, data), data["dtype"]
        vocabulary = data.get("draft_vocab_size", 0)
        wanted = config_json(config, dtype, vocabulary)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing; {REMEDY}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged ({str(error).splitlines()[0]}); {REMEDY}") from None
    for key in sorted(set(wanted) | set(data)):
        if key not in data:
            raise ValueError(f"{path}: key {key!r} is missing; {REMEDY}")
        if key not in wanted:
            raise ValueError(f"{path}: key {key!r} is not in the contract; {REMEDY}")
        if data[key] != wanted[key]:
            raise ValueError(f"{path}: {key} is {data[key]!r}, the contract wants {wanted[key]!r}; {REMEDY}")
    return config, dtype, vocabulary


def drafter_config(path: Path, data: dict[str, Any]) -> DrafterConfig:
    """The drafter behind a config.json. Raises KeyError for a key that is missing: nothing is a default."""
    if zlab.claims(data):
        return zlab.drafter_config(Fields(path, data))
    if data["architectures"] != [ARCHITECTURE]:
        raise ValueError(f"architectures is {data['architectures']!r}, the contract wants {[ARCHITECTURE]!r}")
    return DrafterConfig(
        kind="dspark",
        draft_tokens=data["block_size"],
        layers=data["num_hidden_layers"],
        hidden_size=data["hidden_size"],
        vocab_size=data["vocab_size"],
        heads=data["num_attention_heads"],
        kv_heads=data["num_key_value_heads"],
        head_dim=data["head_dim"],
        intermediate=data["intermediate_size"],
        eps=data["rms_norm_eps"],
        rope_theta=data["rope_parameters"]["rope_theta"],
        max_positions=data["max_position_embeddings"],
        taps=tuple(data["target_layer_ids"]),
        target_layers=data["num_target_layers"],
        mask_token_id=data["mask_token_id"],
        layer_types=tuple(data["layer_types"]),
        sliding_window=data["sliding_window"] or 0,
        block_causal=data["is_causal"],
        markov_rank=data["markov_rank"],
        markov_head=data["markov_head_type"],
        confidence=data["enable_confidence_head"],
        confidence_with_markov=data["confidence_head_with_markov"],
    )


def read_tensors(folder: Path, config: DrafterConfig, dtype: str, vocabulary: int) -> dict[str, torch.Tensor]:
    """The file's tensors: exactly the contract's names, shapes and dtype, all finite."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {REMEDY}") from None
    check_shapes(path, tensors, expected_tensors(config, vocabulary))
    for name, tensor in tensors.items():
        if name not in MAPS and tensor.dtype != getattr(torch, dtype, None):
            found = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{path}: tensor {name} is {found}, config.json says {dtype}; {REMEDY}")
    return tensors


def check_shapes(path: Path, tensors: dict[str, torch.Tensor], wanted: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError for the first tensor that is missing, extra, of another shape, or not finite."""
    if missing := sorted(set(wanted) - set(tensors)):
        raise ValueError(f"{path}: tensor {missing[0]} is missing{_more(missing)}; {REMEDY}")
    if extra := sorted(set(tensors) - set(wanted)):
        raise ValueError(f"{path}: tensor {extra[0]} is not in the contract{_more(extra)}; {REMEDY}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{path}: tensor {name} is {tuple(tensors[name].shape)}, the contract has {shape}; {REMEDY}")
        if name not in MAPS and not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{path}: tensor {name} is not finite; {REMEDY}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
