"""The target as a GGUF file for llama.cpp, written by the converter that llama.cpp brings. Kept beside the engines."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from specgraft.engines.install import installed, root

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def gguf_path(model: Path, dtype: str) -> Path:
    """Where the file of a Hugging Face folder lies: its name says the folder, its files and the type."""
    if not (model / "config.json").is_file():
        raise ValueError(f"{model}: no config.json there; give a Hugging Face folder or a .gguf file")
    files = sorted(path for path in model.iterdir() if path.suffix in {".json", ".safetensors", ".model", ".jinja"})
    text = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    digest = hashlib.sha256(f"{model.resolve()}\n{text}".encode()).hexdigest()[:12]
    return root() / "gguf" / f"{model.resolve().name}-{digest}-{TYPES[dtype]}.gguf"


def to_gguf(model: Path, dtype: str = "float32") -> Path:
    """The GGUF file of a Hugging Face folder, converted on first use with the weights in `dtype`.

    Runs in this environment's Python (torch and transformers), as a process of its own. Raises ValueError in one line.
    """
    out = gguf_path(model, dtype)
    if out.is_file():
        return out
    converter = installed("llamacpp") / "convert"
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    # packages last: they only fill what this environment lacks
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(converter / "packages")) if path]
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=out.parent) as folder, log.open("wb") as said:
        part = Path(folder) / out.name
        command = [sys.executable, str(converter / "convert_hf_to_gguf.py"), str(model), "--outtype", TYPES[dtype], "--outfile", str(part)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment).returncode
        if code or not part.is_file():
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise ValueError(f"{model}: llama.cpp's converter failed with code {code}: {lines[-1][:200] if lines else ''} (log: {log})")
        part.rename(out)
    return out
