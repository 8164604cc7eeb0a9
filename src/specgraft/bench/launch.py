"""Starts the engine of a benchmark, with a drafter or without. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from specgraft.bench.load import Served
from specgraft.config import BenchSection
from specgraft.engines import llamacpp, sglang, vllm
from specgraft.engines.process import Process, free_port

MARGIN = 16  # tokens of context beyond prompt and answer


class Launcher:
    """`launcher(model, drafter, widest)` is a server, up while its `with` block lasts. Logs go to `folder`/logs."""

    def __init__(self, part: BenchSection, program: str, folder: Path, dtype: str, vocabulary: int = 0) -> None:
        self.part, self.program, self.folder, self.dtype, self.vocabulary = part, program, folder, dtype, vocabulary
        self.started = 0

    def __call__(self, model: str, drafter: str, widest: int) -> AbstractContextManager[Served]:
        return self._serve(model, drafter, widest)

    @contextmanager
    def _serve(self, model: str, drafter: str, widest: int) -> Iterator[Served]:
        port = free_port()
        self.started += 1
        log = self.folder / "logs" / f"{self.started:02d}-{Path(model).stem}-{Path(drafter).name or 'none'}.log"
        command, environment = self.command(model, drafter, port, widest)
        health = {"llamacpp": llamacpp, "vllm": vllm, "sglang": sglang}[self.part.engine].HEALTH
        with Process(command, port, log, health, environment, self.part.start_timeout) as server:
            name = ""
            if self.part.engine == "vllm":
                name = httpx.get(f"{server.url}/v1/models", timeout=self.part.timeout, trust_env=False).json()["data"][0]["id"]
            yield Served(server.url, self.part.engine, name, self.vocabulary)

    def command(self, model: str, drafter: str, port: int, widest: int) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of the server. Raises ValueError for a drafter folder that the engine cannot load."""
        context = self.part.prompt_tokens + self.part.max_new_tokens + MARGIN
        count, more = self.part.draft_tokens, list[str]()
        if self.part.engine == "llamacpp":
            if not Path(model).is_file():
                raise ValueError(f"{model}: no GGUF file of the target there; name one in bench.models, such as {{f32 = \"target-f32.gguf\"}}")
            if drafter:
                more = ["-md", str(_gguf(drafter))]
                more += ["--spec-draft-n-max", str(count or _gguf_drafts(drafter))]
            return llamacpp.command(self.program, model, port, context=context, parallel=widest, threads=self.part.threads, more=more), llamacpp.environment()
        if self.part.engine == "vllm":
            if drafter:
                kind, size = _kind(drafter)
                how = {"method": "dspark" if kind == "dspark" else "dflash", "model": drafter, "num_speculative_tokens": count or size}
                more = ["--speculative-config", json.dumps(how), "--per-request-spec-decode-metrics", "summary"]
            line = vllm.command(self.program, model, port, context=context, parallel=widest, dtype=self.dtype, more=more)
            return line, vllm.environment(threads=self.part.threads)
        if drafter:
            kind, size = _kind(drafter)
            more = ["--speculative-algorithm", "DSPARK" if kind == "dspark" else "DFLASH", "--speculative-draft-model-path", drafter]
            if count:
                more += ["--speculative-dspark-block-size", str(count)] if kind == "dspark" else ["--speculative-num-draft-tokens", str(count + 1)]
        return sglang.command(self.program, model, port, context=context, parallel=widest, dtype=self.dtype, more=more), sglang.environment()


def _gguf(drafter: str) -> Path:
    path = Path(drafter)
    path = path / "drafter.gguf" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no drafter for llama.cpp there; make it with `specgraft export --to llamacpp`")
    return path


def _gguf_drafts(drafter: str) -> int:
    """Drafts a round that the file was made for, from the export's provenance; llama.cpp's own default would be 3."""
    note = _gguf(drafter).with_name("provenance.json")
    try:
        return int(json.loads(note.read_text(encoding="utf-8"))["config"]["drafters"]["draft_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{note}: does not say how many drafts the file was made for; set bench.draft_tokens") from None


def _kind(drafter: str) -> tuple[str, int]:
    """Kind and drafts a round of an exported folder."""
    path = Path(drafter) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["architectures"] == ["Qwen3DSparkModel"]:
            return "dspark", int(data["block_size"])
        block = data.get("block_size") or data["dflash_config"]["block_size"]
        return "dflash", int(block) - 1
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: no drafter for a Hugging Face engine there; make it with `specgraft export`") from None
