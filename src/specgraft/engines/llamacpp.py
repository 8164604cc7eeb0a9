"""llama.cpp's `llama-server`: protocol and command line (read in b11434, run with it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraft.engines.wire import Ask, Reply, settle, token_ids

HEALTH = "/health"
METRICS = "/metrics"


def request(ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body. Every sampler is named: a GGUF file may bring sampling defaults of its own."""
    body: dict[str, Any] = {
        "prompt": ask.ids,
        "n_predict": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        # temperature before the cuts, as everywhere else here; its own order puts it last
        "samplers": ["temperature", "top_k", "top_p"] if ask.temperature > 0 else ["temperature"],
        "return_tokens": True,
        "cache_prompt": False,  # a reused prefix was computed in other batches: other bits, other ties
        "stream": False,
    }
    if ask.seed is not None:
        body["seed"] = ask.seed & 0x7FFFFFFF
    return "/completion", body


def reply(ask: Ask, answer: dict[str, Any]) -> Reply:
    ids = token_ids(answer.get("tokens") or None, "tokens", "use llama-server, which has `return_tokens`")
    return settle(ask, ids, answer.get("stop_type") == "eos")


def command(
    binary: str | Path,
    model: str | Path,
    port: int,
    host: str = "127.0.0.1",
    context: int = 2048,
    parallel: int = 4,
    threads: int = 0,
    cache: str = "f16",
    more: Sequence[str] = (),
) -> list[str]:
    """`context` tokens for each of `parallel` requests at a time; `threads` 0: its own choice; `cache`: type of keys and values."""
    line = [str(binary), "-m", str(model), "--host", host, "--port", str(port), "-c", str(context * parallel), "-np", str(parallel)]
    line += ["-t", str(threads)] if threads else []
    # its flash attention moves log-probabilities by 1e-3 to 1e-2 even with keys and values in float32; without it, by 1e-4
    line += ["-fa", "off"] if cache == "f32" else []
    # no context shift: an answer must not outlive its prompt
    return [*line, "--no-context-shift", "-ctk", cache, "-ctv", cache, "--metrics", "--no-webui", *more]


def environment() -> dict[str, str]:
    """Waiting OpenMP threads give their core away: beside other work a decode is otherwise many times slower."""
    return {"OMP_WAIT_POLICY": "passive"}
