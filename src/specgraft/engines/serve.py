"""How each engine is started for one target on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specgraft.engines import llamacpp, sglang, vllm
from specgraft.engines.gguf import TYPES, gguf_path, to_gguf
from specgraft.engines.install import ENGINES, installed
from specgraft.engines.process import Process


@dataclass(frozen=True)
class Serving:
    """What is served and how. Filled by `specgraft serve` and the benchmarks."""

    engine: str  # llamacpp, vllm, sglang
    model: Path  # Hugging Face folder; llamacpp: or a .gguf file
    port: int
    host: str = "127.0.0.1"
    dtype: str = "bfloat16"  # of the weights
    context: int = 2048  # tokens of one request, prompt and answer
    parallel: int = 8  # requests decoded together
    threads: int = 0  # 0: the engine's own choice
    more: Sequence[str] = field(default=())  # further flags of the engine, as they are

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r} is unknown: use {', '.join(ENGINES)}")
        if self.dtype not in TYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown: use {', '.join(TYPES)}")

    def command(self, dry: bool = False) -> list[str]:
        """The command line. `dry`: nothing is converted or looked for, the paths are those that it would have.

        Raises ValueError where the engine is not installed.
        """
        folder = ENGINES[self.engine].folder(self.engine) if dry else installed(self.engine)
        if self.engine == "llamacpp":
            ready = self.model.suffix == ".gguf"
            model = self.model if ready else gguf_path(self.model, self.dtype) if dry else to_gguf(self.model, self.dtype)
            program = folder / "bin" / "llama-server"
            return llamacpp.command(
                program, model, self.port, self.host, self.context, self.parallel, self.threads, TYPES[self.dtype], self.more
            )
        module = vllm if self.engine == "vllm" else sglang
        python = folder / "venv" / "bin" / "python"
        return module.command(python, self.model, self.port, self.host, self.context, self.parallel, self.dtype, self.more)

    def environment(self) -> dict[str, str]:
        """What is set on top of the caller's environment."""
        if self.engine == "vllm":
            return vllm.environment(threads=self.threads)
        return llamacpp.environment() if self.engine == "llamacpp" else sglang.environment()

    def process(self, log: Path, limit: float = 300.0) -> Process:
        """The server as a child process, not started yet."""
        health = {"llamacpp": llamacpp, "vllm": vllm, "sglang": sglang}[self.engine].HEALTH
        return Process(self.command(), self.port, log, health, self.environment(), limit, self.host)


def start(serving: Serving, dry: bool) -> None:
    """Prints the command; unless `dry`, this process becomes the server. Raises ValueError in one line."""
    command, environment = serving.command(dry), serving.environment()
    print(shlex.join([*(f"{name}={value}" for name, value in environment.items()), *command]), flush=True)
    if dry:
        return
    try:
        os.execve(command[0], command, {**os.environ, **environment})
    except OSError as error:
        raise ValueError(f"{command[0]}: cannot be started ({error.strerror}); run `make engines ENGINES={serving.engine}`") from None
