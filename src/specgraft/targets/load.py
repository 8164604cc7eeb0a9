"""Loads a target by name: the embedded one, a Hugging Face folder, or a hub id."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from specgraft.targets.kinds import KINDS, SERVED, has_final_norm
from specgraft.targets.model import Target
from specgraft.targets.text import digest as digest
from specgraft.targets.text import refuse_no_template, resolve


def pick_device(name: str) -> torch.device:
    """`auto` is the accelerator where there is one, else the CPU. Raises ValueError for a device that is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"run.device={name!r}: no such device; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"run.device={name!r}: no CUDA device here; use auto or cpu")
    return device


def load_target(name: str, dtype: str = "bfloat16", device: str = "auto", remote_code: bool = False) -> Target:
    """Loads a frozen target for inference. Raises ValueError, in one line, for what it cannot serve."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    from specgraft.targets.attention import NAME

    hf_logging.disable_progress_bar()
    source = resolve(name)
    where = pick_device(device)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code)
        refuse_unsupported(config)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code)
        loader: Any = AutoModelForCausalLM  # its stubs know no loading info
        model, found = loader.from_pretrained(
            source, dtype=getattr(torch, dtype), trust_remote_code=remote_code, attn_implementation=NAME, output_loading_info=True
        )
    except (OSError, KeyError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"target.id={name!r} could not be loaded: {first}") from None
    # transformers fills what it does not find with random values and goes on
    if absent := sorted(found["missing_keys"]) + sorted(str(row[0]) for row in found["mismatched_keys"]):
        near = ", ".join(sorted(found["unexpected_keys"])[:3])
        raise ValueError(
            f"target.id={name!r}: its weights hold no {absent[0]} of the right shape ({len(absent)} tensors in all"
            + (f"; unknown there: {near}" if near else "") + "): give a folder whose names are those of its architecture"
        )  # fmt: skip
    if not isinstance(getattr(model.base_model, "layers", None), torch.nn.ModuleList) or not has_final_norm(model.base_model):
        raise ValueError(
            f"target.id={name!r}: {config.model_type} has no decoder layers and final norm under the names that are read "
            "(`layers`, `norm`): use a model built like Llama or Qwen3"
        )
    refuse_no_template(name, tokenizer)
    return Target(model.to(where), tokenizer, Path(source), where)


def refuse_unsupported(config: Any) -> None:
    """Refuses by name what a pass of the target would compute wrongly: layers and attention extras that nobody handles yet."""
    if hasattr(config, "get_text_config"):  # a model that sees and hears names its layers one level below
        config = config.get_text_config(decoder=True)
    odd = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]) - SERVED)
    if odd:
        raise ValueError(f"target {config.model_type}: {', '.join(odd)} layers are not served in process yet; served: {', '.join(sorted(SERVED))}")
    special = {"linear_attention", "indexed_attention"} & set(getattr(config, "layer_types", None) or ())
    if special and config.model_type not in KINDS:
        raise ValueError(
            f"target {config.model_type}: its {', '.join(sorted(special))} layers are not served in process yet, "
            f"only those of {', '.join(sorted(KINDS))}"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            raise ValueError(f"target {config.model_type}: {key} is not served in process yet")


def identity(target: Target) -> dict[str, str]:
    """Digests of what makes a target this target: weights, tokenizer, chat template, and its dtype.

    One that is loaded elsewhere (`targets.outer`) brings what was found there.
    """
    given: dict[str, str] | None = getattr(target, "given_identity", None)
    if given is not None:
        return given
    hasher = hashlib.sha256()
    for name, tensor in sorted(target.model.state_dict().items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    vocabulary = json.dumps(sorted(target.tokenizer.get_vocab().items()), ensure_ascii=True)
    return {
        "id": str(target.path),
        "weights": hasher.hexdigest(),
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "chat_template": hashlib.sha256(str(target.tokenizer.chat_template).encode()).hexdigest(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
