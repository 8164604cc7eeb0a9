"""SGLang's native server: protocol and command line (read in 0.5.23; it does not run without a GPU)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraft.engines.wire import Ask, Reply, settle, token_ids

HEALTH = "/health"
METRICS = "/metrics"


def request(ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body. Every sampling key is set: the server takes missing ones from the model's generation_config.json."""
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k or -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "stop_token_ids": list(ask.stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if ask.seed is not None:
        sampling["sampling_seed"] = ask.seed & 0x7FFFFFFF
    return "/generate", {"input_ids": ask.ids, "sampling_params": sampling, "stream": False}


def reply(ask: Ask, answer: dict[str, Any]) -> Reply:
    ids = token_ids(answer.get("output_ids"), "output_ids", "use SGLang 0.5 or newer")
    meta = answer.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    reason = reason if isinstance(reason, dict) else {}
    matched = reason.get("matched")
    return settle(ask, ids, reason.get("type") == "stop", matched if type(matched) is int else None)


def command(
    python: str | Path,
    model: str | Path,
    port: int,
    host: str = "127.0.0.1",
    context: int = 2048,
    parallel: int = 16,
    dtype: str = "bfloat16",
    more: Sequence[str] = (),
) -> list[str]:
    line = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", dtype, "--context-length", str(context)]
    line += ["--max-running-requests", str(parallel), "--host", host, "--port", str(port)]
    return [*line, "--disable-radix-cache", "--enable-metrics", *more]


def environment() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1"}
