"""Loads an exported folder with SGLang's own model class on the CPU, and runs its block; prints one JSON object.

Run as a script: it replaces what SGLang needs a GPU or a server for by stubs, so it must not share a process with tests.
Usage: sglang_load.py EXPORT_FOLDER TENSORS.safetensors (taps [T,K*D], states [G,D]); modules come from PYTHONPATH.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("SGLANG_RAGGED_VERIFY_MODE", "cap-accept")  # the mode that builds the confidence head

STUBS = (
    "pybase64 triton starlette zmq tvm_ffi torchvision IPython gguf vllm fastapi uvicorn uvloop aiohttp sgl_kernel "
    "flashinfer prometheus_client torchao xgrammar llguidance outlines interegular decord soundfile scipy pynvml "
    "nvidia cuda cutlass quack setproctitle multipart timm blobfile tiktoken sentencepiece requests torchaudio"
).split()


class Anything:
    """A class, decorator, function or value, as the importing code likes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getitem__(self, item: Any) -> Any:
        return Anything()

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class Stub(types.ModuleType):
    __version__ = "9.9.9"
    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper() or name == "constexpr":
            made: Any = type(name, (Anything,), {})
        else:
            made = Anything()
        setattr(self, name, made)
        return made


class Finder:
    """The last finder asked: what is installed is used, what is on the list is made up."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: Any) -> Any:
        return Stub(spec.name)

    @staticmethod
    def exec_module(module: Any) -> None: ...


def bare_sglang() -> None:
    """The package without its __init__, which starts a language API and patches libraries."""
    for folder in sys.path:
        if (Path(folder) / "sglang" / "srt").is_dir():
            package = types.ModuleType("sglang")
            package.__path__ = [str(Path(folder) / "sglang")]
            package.__spec__ = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
            package.__version__ = "0.5.23"  # type: ignore[attr-defined]
            sys.modules["sglang"] = package
            return
    raise SystemExit("no sglang on PYTHONPATH")


def main(folder: Path, inputs: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoProcessor, PreTrainedModel, PreTrainedTokenizerFast  # noqa: F401

    # the stubs come after transformers has looked at what is installed, or it would take them for the real packages
    sys.meta_path.append(Finder)  # type: ignore[arg-type]
    bare_sglang()
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    from safetensors.torch import load_file
    from sglang.srt.models.dspark import Qwen3DSparkModel
    from sglang.srt.runtime_context import get_parallel

    config = AutoConfig.from_pretrained(folder)
    file = load_file(folder / "model.safetensors")
    given = load_file(inputs)
    group = MagicMock(world_size=1, rank=0, rank_in_group=0, local_rank=0)
    with get_parallel().override(tp_size=1, tp_rank=0, tp_group=group), torch.no_grad():
        model = Qwen3DSparkModel(config=config).to(torch.float32)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.load_weights((name, tensor.float()) for name, tensor in file.items())
        unloaded = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
        hidden = block(model, given["taps"], given["states"])
        previous = torch.tensor([5])
        embedded = model.markov_head.get_prev_embeddings(previous)
        confidence = model.confidence_head(hidden[:1], embedded)
    return {
        "unloaded": unloaded,
        "gamma": model.gamma,
        "sample_from_anchor": model.sample_from_anchor,
        "attention": sorted({str(layer.self_attn.attn.attn_type) for layer in model.layers}),
        "hidden": hidden.tolist(),
        "confidence": float(confidence[0]),
    }


def block(model: Any, taps: Any, states: Any) -> Any:
    """SGLang's forward with its paged attention replaced by plain attention over stored context and block."""
    import torch

    length = len(taps)
    context = model.project_target_hidden(taps)
    for layer in model.layers:
        own = layer.self_attn
        key, value = own.kv_proj_only(context)
        key = own.apply_k_rope(torch.arange(length), own.apply_k_norm(key))
        keys, values = (x.reshape(length, own.num_kv_heads, own.head_dim) for x in (key, value))

        def attend(
            q: Any, k: Any, v: Any, *args: Any, keys: Any = keys, values: Any = values, own: Any = own, **kwargs: Any
        ) -> Any:
            q, k, v = (x.reshape(len(states), -1, own.head_dim) for x in (q, k, v))
            k, v = torch.cat([keys, k]), torch.cat([values, v])
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
            )
            return out[0].transpose(0, 1).reshape(len(states), -1)

        attend.attn_type = own.attn.attn_type  # type: ignore[attr-defined]
        own.attn = None
        object.__setattr__(own, "attn", attend)
        own.__dict__["attn"] = attend
        own._modules.pop("attn", None)
    positions = length + torch.arange(len(states))
    ids = torch.zeros(len(states), dtype=torch.long)
    out = model(ids, positions, None, input_embeds=states)
    return getattr(out, "hidden_states", out)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
