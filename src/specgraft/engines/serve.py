"""How each engine is started for one target on this machine."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specgraft.engines import llamacpp, sglang, vllm
from specgraft.engines.client import ENGINES as SERVERS
from specgraft.engines.gguf import TYPES, gguf_path, to_gguf
from specgraft.engines.install import ENGINES, installed
from specgraft.engines.process import Process
from specgraft.engines.states import CONNECTOR, sglang_flags, states_folder, vllm_flags


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
    taps: Sequence[int] = ()  # decoder layers whose outputs it returns, and the last one's; (): none
    states: str = ""  # folder in which vLLM leaves them; empty: `states` beside the engines

    def __post_init__(self) -> None:
        if self.engine not in SERVERS:
            raise ValueError(f"engine {self.engine!r} is unknown: use {', '.join(SERVERS)}")
        if self.dtype not in TYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown: use {', '.join(TYPES)}")
        if self.taps and self.engine == "llamacpp":
            raise ValueError("llamacpp gives no hidden states of layers: use vllm, or sglang")
        if self.states and (self.engine != "vllm" or not self.taps):
            raise ValueError("--states is where vLLM leaves hidden states: give --taps, and vllm")

    def _states_flags(self) -> list[str]:
        if not self.taps:
            return []
        layers, taps = decoder_layers(self.model), list(self.taps)
        if taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= layers:
            raise ValueError(f"--taps {','.join(map(str, taps))}: name decoder layers of 0 to {layers - 1}, each once, in rising order")
        return sglang_flags(taps, layers) if self.engine == "sglang" else vllm_flags(taps, layers, states_folder(self.states))

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
        python, more = folder / "venv" / "bin" / "python", [*self._states_flags(), *self.more]
        return module.command(python, self.model, self.port, self.host, self.context, self.parallel, self.dtype, more)

    def environment(self) -> dict[str, str]:
        """What is set on top of the caller's environment."""
        if self.engine == "vllm":
            path = os.pathsep.join([str(CONNECTOR), *filter(None, [os.environ.get("PYTHONPATH")])])
            return vllm.environment(threads=self.threads) | ({"PYTHONPATH": path} if self.taps else {})
        return llamacpp.environment() if self.engine == "llamacpp" else sglang.environment()

    def process(self, log: Path, limit: float = 300.0) -> Process:
        """The server as a child process, not started yet."""
        health = {"llamacpp": llamacpp, "vllm": vllm, "sglang": sglang}[self.engine].HEALTH
        return Process(self.command(), self.port, log, health, self.environment(), limit, self.host)


def decoder_layers(folder: Path) -> int:
    """Of a Hugging Face folder. Raises ValueError where its config does not say."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: does not say how many layers the target has; give the folder of the target") from None


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
