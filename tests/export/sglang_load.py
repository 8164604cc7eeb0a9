"""Asks SGLang's own code on the CPU about exported folders and targets, one job after the other; prints one JSON object.

Run as a script: it replaces what SGLang needs a GPU or a server for by stubs, so it must not share a process with tests.
Usage: sglang_load.py JOBS.json, a list of objects with `name`, `do` (a function of sglang_model) and what that reads; modules come from
PYTHONPATH. Answers by name: what the job returns, or {"error": ..} with the exception that SGLang raised.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import sys
import traceback
import types
from pathlib import Path
from typing import Any

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


def plain(value: Any) -> Any:
    """Tensors as lists, which JSON carries without loss."""
    return value.tolist() if hasattr(value, "tolist") else value


def main(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoProcessor, PreTrainedModel, PreTrainedTokenizerFast  # noqa: F401

    # the stubs come after transformers has looked at what is installed, or it would take them for the real packages
    sys.meta_path.append(Finder)  # type: ignore[arg-type]
    bare_sglang()
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda function: function)  # type: ignore[assignment]
    import sglang_model
    from safetensors.torch import load_file

    answers = {}
    with sglang_model.one_process(Path(jobs[0]["folder"])):
        for job in jobs:
            try:
                given = load_file(job["inputs"]) if "inputs" in job else {}
                found = getattr(sglang_model, job["do"])(job, given)
                answers[job["name"]] = {key: plain(value) for key, value in found.items()}
            except Exception as error:  # what SGLang says of a folder is the answer
                answers[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
    return answers


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
