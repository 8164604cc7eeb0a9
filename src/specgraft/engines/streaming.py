"""One answer as a stream of token ids with the time of each piece, per engine. HTTP only, no torch.

What an engine says of its own speculation per request is taken from the last event; a drafter's counters for a whole run are
in `counters`. Sources: llama.cpp b11434 (tools/server), vLLM 0.32 (/v1/completions), SGLang 0.5.23 (/generate).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from specgraft.engines import llamacpp, sglang, vllm
from specgraft.engines.wire import Ask, Unusable

MODULES: dict[str, Any] = {"llamacpp": llamacpp, "vllm": vllm, "sglang": sglang}


@dataclass
class Streamed:
    """One answer. Filled by `ask_streaming`; times are seconds since the request was sent."""

    ids: list[int] = field(default_factory=list)  # without the end token where the engine keeps that to itself
    times: list[float] = field(default_factory=list)  # arrival of each piece
    sizes: list[int] = field(default_factory=list)  # ids in each piece: the tokens of one step, where the engine sends them so
    reason: str = ""  # "stop" or "length"
    drafted: int | None = None  # draft tokens verified, and of these accepted; None where the engine does not say
    accepted: int | None = None
    steps: int | None = None  # verify passes
    prompt_tokens: int | None = None


def body_of(engine: str, ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a streaming request."""
    path, body = MODULES[engine].request(ask, model)
    more = {"stream_options": {"include_usage": True}} if engine == "vllm" else {}
    return path, body | {"stream": True} | more


def take(engine: str, event: dict[str, Any], found: Streamed, now: float) -> None:
    """Adds one event of an engine's stream. Raises Unusable for an error event, or a piece without token ids."""
    if error := event.get("error"):
        text = error.get("message", "") if isinstance(error, dict) else error
        raise Unusable(f"the server broke off the answer: {' '.join(str(text).split())[:200]}")
    ids, reason = {"llamacpp": _llamacpp, "vllm": _vllm, "sglang": _sglang}[engine](event, found)
    if ids:
        found.ids += ids
        found.times.append(now)
        found.sizes.append(len(ids))
    if reason:
        found.reason = reason


def _llamacpp(event: dict[str, Any], found: Streamed) -> tuple[list[int], str]:
    if event.get("stop"):
        timings = event.get("timings") or {}
        if "draft_n" in timings:
            found.drafted, found.accepted = int(timings["draft_n"]), int(timings.get("draft_n_accepted", 0))
        found.prompt_tokens = event.get("tokens_evaluated")
        return _ids(event.get("tokens", []), "tokens"), "stop" if event.get("stop_type") == "eos" else "length"
    return _ids(event.get("tokens"), "tokens"), ""


def _vllm(event: dict[str, Any], found: Streamed) -> tuple[list[int], str]:
    metrics = (event.get("metrics") or {}).get("speculative_decoding") or {}
    if "num_spec_steps" in metrics:
        found.steps, found.drafted = int(metrics["num_spec_steps"]), int(metrics.get("num_draft_tokens", 0))
        found.accepted = int(metrics.get("num_accepted_draft_tokens", 0))
    if usage := event.get("usage"):
        found.prompt_tokens = usage.get("prompt_tokens")
    choices = event.get("choices") or []
    if not choices:
        return [], ""
    return _ids(choices[0].get("token_ids") or ([] if not choices[0].get("text") else None), "token_ids"), choices[0].get("finish_reason") or ""


def _sglang(event: dict[str, Any], found: Streamed) -> tuple[list[int], str]:
    meta = event.get("meta_info") or {}
    if "spec_verify_ct" in meta:
        found.steps, found.accepted = int(meta["spec_verify_ct"]), int(meta.get("spec_num_correct_drafts", 0))
        found.drafted = int(meta.get("spec_num_proposed_drafts", 0))
    found.prompt_tokens = meta.get("prompt_tokens")
    reason = (meta.get("finish_reason") or {}).get("type", "")
    return _ids(event.get("output_ids"), "output_ids")[len(found.ids) :], reason  # every event repeats what came before


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise Unusable(f"a piece of the answer has no token ids at {name}")
    return value


async def ask_streaming(client: httpx.AsyncClient, url: str, engine: str, ask: Ask, model: str, timeout: float) -> Streamed:
    """Sends one request and reads its stream to the end.

    Raises Unusable for an answer that says an error or ends early, httpx.HTTPError for a broken connection or a silence of
    more than `timeout` seconds.
    """
    path, body = body_of(engine, ask, model)
    found, began = Streamed(), time.perf_counter()
    async with client.stream("POST", url + path, json=body, timeout=timeout) as response:
        if response.status_code != 200:
            text = " ".join((await response.aread()).decode(errors="replace").split())
            raise Unusable(f"HTTP {response.status_code} {text[:200]}")
        async for event in events(response):
            take(engine, event, found, time.perf_counter() - began)
    if not found.reason:
        raise Unusable(f"the stream ended behind {len(found.ids)} ids without saying why")
    return found


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream, up to its `[DONE]`. Raises Unusable for a line that is none."""
    async for line in response.aiter_lines():
        if line.startswith("error:"):
            raise Unusable(f"the server broke off the answer: {line[6:].strip()[:200]}")
        if not line.startswith("data:"):
            continue
        text = line[5:].strip()
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            raise Unusable("a piece of the answer is no JSON") from None
        if isinstance(event, dict):
            yield event
