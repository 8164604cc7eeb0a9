"""What a trainer borrows of a target that runs elsewhere: embedding, head and final norm of a checkpoint, without the layers.

Tensors are read by name from the checkpoint's own files; places stay NaN until they are filled, so that nothing is left to chance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from specgraft.targets import text
from specgraft.targets.kinds import final_norm, has_final_norm
from specgraft.targets.load import pick_device, refuse_unsupported
from specgraft.targets.text import resolve


class Outer:
    """As much of `targets.model.Target` as training uses when states and scores come from elsewhere. Filled by `load_outer`.

    `given_identity`: digests of the target that makes the states, asked where it is loaded.
    """

    def __init__(self, model: Any, tokenizer: Any, path: Path, device: torch.device) -> None:
        self.tokenizer, self.path, self.device = tokenizer, path, device
        self.config = model.config
        self.final_norm: nn.Module = final_norm(model.base_model)
        self.streams: int = getattr(self.config, "hc_count", None) or 1
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.head: nn.Linear = model.get_output_embeddings()
        self.num_layers = len(model.base_model.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.dtype: torch.dtype = self.head.weight.dtype
        self.end_ids = text.end_ids(getattr(model.generation_config, "eos_token_id", None), tokenizer)
        self.context = text.context_of(model.config)
        self.given_identity: dict[str, str] = {}


def load_outer(name: str, dtype: str = "bfloat16", device: str = "auto", remote_code: bool = False) -> Outer:
    """Raises ValueError, in one line, for a target that is not there, or whose files hold none of these tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, where, kind = resolve(name), pick_device(device), getattr(torch, dtype)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code)
        refuse_unsupported(config)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code)
        maker: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model = maker.from_config(config, dtype=kind, trust_remote_code=remote_code)
        try:
            model.generation_config = GenerationConfig.from_pretrained(source)
        except OSError:
            model.generation_config = GenerationConfig.from_model_config(config)
        files = tensor_files(source)
    except (OSError, KeyError, ValueError, ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"target.id={name!r} could not be loaded: {first}") from None
    text.refuse_no_template(name, tokenizer)
    if not has_final_norm(model.base_model):
        raise ValueError(f"target.id={name!r}: {config.model_type} has no final norm under the names that are read")
    if packed := getattr(config, "quantization_config", None):
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise ValueError(f"target.id={name!r}: its weights are packed ({method}); give a folder whose head and embedding are not")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight or getattr(config, "tie_word_embeddings", False)
    names = {id(module): prefix for prefix, module in model.named_modules()}
    for part in (model.get_input_embeddings(), model.get_output_embeddings(), final_norm(model.base_model)):
        if tied and part is model.get_output_embeddings():
            part.weight = model.get_input_embeddings().weight
            continue
        fill(part, names[id(part)], files, name, where, kind)
    for module in (model.get_output_embeddings(), final_norm(model.base_model)):
        module.requires_grad_(False).eval()
    return Outer(model, tokenizer, Path(source), where)


def fill(module: nn.Module, prefix: str, files: dict[str, Path], target: str, device: torch.device, dtype: torch.dtype) -> None:
    """Gives a module on the meta device its tensors. Raises ValueError naming one that is not there, or has another shape."""
    wanted = {key: value.shape for key, value in module.state_dict().items()}
    module.to_empty(device=device)
    state = {}
    for key, shape in wanted.items():
        full = stored_name(f"{prefix}.{key}", files, target)
        try:
            with safe_open(files[full], framework="pt") as shard:
                value = shard.get_tensor(full)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{files[full]}: {full} cannot be read ({str(error).splitlines()[0]}); fetch the file again") from None
        if value.shape != shape:
            raise ValueError(f"target.id={target!r}: {full} is {tuple(value.shape)}, and its architecture has {tuple(shape)}")
        state[key] = value.to(dtype)
    for buffer in module.buffers():
        buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer.zero_()
    module.load_state_dict(state)
    if odd := [key for key, value in (*module.named_parameters(), *module.named_buffers()) if value.isnan().any()]:
        raise ValueError(f"target.id={target!r}: {prefix}.{odd[0]} holds no numbers; give a folder whose names are those of its architecture")


def stored_name(wanted: str, files: dict[str, Path], target: str) -> str:
    """The tensor's name in the files: its own, or the only one that ends as it does (a model inside another carries a prefix)."""
    if wanted in files:
        return wanted
    short = wanted.removeprefix("model.")
    if len(found := [name for name in files if name.endswith(f".{short}") or name == short]) == 1:
        return found[0]
    near = ", ".join(sorted(name for name in files if name.endswith(wanted.rpartition(".")[2]) and "layers." not in name)[:3])
    raise ValueError(f"target.id={target!r}: its weights hold no {wanted}" + (f"; there are {near}" if near else "") + ": give a folder whose names are those of its architecture")


def tensor_files(source: str) -> dict[str, Path]:
    """The file of every tensor of a folder or hub id; files are fetched when they are named. Raises OSError where there is none."""
    from transformers.utils.hub import cached_file

    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        whole = Path(str(cached_file(source, "model.safetensors")))
        with safe_open(whole, framework="pt") as shard:
            return dict.fromkeys(shard.keys(), whole)
    places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    outer = {name: file for name, file in places.items() if ".layers." not in name}
    fetched = {file: Path(str(cached_file(source, file))) for file in sorted(set(outer.values()))}
    return {name: fetched[file] for name, file in outer.items()}
