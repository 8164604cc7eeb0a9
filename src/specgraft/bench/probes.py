"""Small questions to a plain server: how near two next tokens are (llama.cpp, vLLM), what a pass over w tokens costs (llama.cpp). No torch.

The pass over w tokens is a prompt whose first part is in the server's cache, so that exactly its last w tokens are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import httpx

from specgraft.bench.load import Served
from specgraft.plan.breakeven import best_draft_tokens


def pass_ms(served: Served, ids: Sequence[int], widths: Sequence[int], repeats: int, timeout: float) -> dict[int, float]:
    """Milliseconds of the target's pass over w new tokens behind the first tokens of `ids`, median of `repeats`, by w.

    Widths take turns. One token is decoded rather than read as a prompt: see the table of plain steps for w = 1.
    Raises ValueError when `ids` is too short or the server computed another number of tokens.
    """
    top = max(widths)
    if len(ids) <= top:
        raise ValueError(f"{len(ids)} ids cannot be cut {top} before their end; give a longer text")
    base, found = list(ids[:-top]), {width: list[float]() for width in widths}
    with httpx.Client(timeout=timeout, trust_env=False) as client:
        for turn in range(repeats + 1):
            for width in widths:
                _complete(client, served, base)
                timings = _complete(client, served, [*base, *ids[len(base) : len(base) + width]])
                if timings["prompt_n"] != width + 1 and timings["prompt_n"] != width:
                    raise ValueError(f"{served.url}: computed {timings['prompt_n']} prompt tokens where {width} were new; its prompt cache is off")
                if turn:  # the first turn warms up
                    found[width].append(timings["prompt_ms"] * width / timings["prompt_n"])
    return {width: median(values) for width, values in found.items()}


def _complete(client: httpx.Client, served: Served, ids: list[int]) -> dict[str, float]:
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0, "return_tokens": True}
    answer = client.post(served.url + "/completion", json=body)
    answer.raise_for_status()
    timings: dict[str, float] = answer.json()["timings"]
    return timings


def best_length(survival: Sequence[float], step_ms: float, passes: dict[int, float], plain_ms: float) -> dict[str, object]:
    """The draft length that would be fastest: T_step(g) = T_step(G) - T(G+1) + T(g+1), where T(w) is the target's pass over w
    tokens and the drafter's own share is taken as fixed, which favours long drafts. 0: no drafter is faster.

    passes must hold w = 2 .. G+1 for G = len(survival).
    """
    size = len(survival)
    steps = [max(step_ms - passes[size + 1] + passes[count + 1], 1e-6) for count in range(1, size + 1)]
    best = best_draft_tokens(survival, steps)
    tau = 1 + sum(survival[:best])
    gain = tau * plain_ms / steps[best - 1]
    return {"draft_tokens": best if gain > 1 else 0, "at": best, "accept_length": tau, "step_ms": steps[best - 1], "speedup": gain}


def gap(served: Served, ids: list[int], timeout: float) -> float | None:
    """Log-probability of the likeliest next token less that of the second; None where the server does not say."""
    if served.engine == "vllm":
        path, body = "/v1/completions", {"model": served.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 2}
        body["return_tokens_as_token_ids"] = True  # two tokens may read alike
    else:
        path, body = "/completion", {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    with httpx.Client(timeout=timeout, trust_env=False) as client:
        answer = client.post(served.url + path, json=body)
    answer.raise_for_status()
    if served.engine == "vllm":
        choices = answer.json().get("choices") or [{}]
        likely = (choices[0].get("logprobs") or {}).get("top_logprobs") or [{}]
        values = sorted(likely[0].values(), reverse=True)
        return float(values[0] - values[1]) if len(values) > 1 else None
    rows = answer.json().get("completion_probabilities") or []
    top = rows[0].get("top_logprobs") if rows else None
    return float(top[0]["logprob"] - top[1]["logprob"]) if top and len(top) > 1 else None
