"""Reads an exported folder back, from its own files alone, as strictly as no engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.registry import build
from specgraft.export.contract import WEIGHTS, config_json, expected_tensors

REMEDY = "run export again"


def load_export(folder: Path) -> Drafter:
    """The drafter in float32, ready to run. Raises ValueError naming the key or tensor that is missing, extra or wrong."""
    config, dtype = read_config(folder)
    tensors = read_tensors(folder, config, dtype)
    drafter = build(config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return drafter.requires_grad_(False).eval()


def read_config(folder: Path) -> tuple[DrafterConfig, str]:
    """Shape of the drafter and dtype of the file, from config.json. Every key of the contract must be there and agree."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        config, dtype = drafter_config(data), data["dtype"]
        wanted = config_json(config, dtype)
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
    return config, dtype


def drafter_config(data: dict[str, Any]) -> DrafterConfig:
    """The drafter behind a config.json. Raises KeyError for a key that is missing: nothing is a default."""
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
        markov_rank=data["markov_rank"],
        markov_head=data["markov_head_type"],
        confidence=data["enable_confidence_head"],
        confidence_with_markov=data["confidence_head_with_markov"],
    )


def read_tensors(folder: Path, config: DrafterConfig, dtype: str) -> dict[str, torch.Tensor]:
    """The file's tensors: exactly the contract's names, shapes and dtype, all finite."""
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {REMEDY}") from None
    wanted = expected_tensors(config)
    if missing := sorted(set(wanted) - set(tensors)):
        raise ValueError(f"{path}: tensor {missing[0]} is missing{_more(missing)}; {REMEDY}")
    if extra := sorted(set(tensors) - set(wanted)):
        raise ValueError(f"{path}: tensor {extra[0]} is not in the contract{_more(extra)}; {REMEDY}")
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{path}: tensor {name} is {tuple(tensor.shape)}, the contract has {shape}; {REMEDY}")
        if tensor.dtype != getattr(torch, dtype, None):
            found = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{path}: tensor {name} is {found}, config.json says {dtype}; {REMEDY}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: tensor {name} is not finite; {REMEDY}")
    return tensors


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
