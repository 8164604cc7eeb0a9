"""`evaluate`: the drafter in the real draft -> verify loop on held-out conversations. This number decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specgraft.config import RunConfig
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import Pair, pair
from specgraft.decode.scheduler import Scheduler
from specgraft.drafters.precision import at_precision
from specgraft.drafters.store import WEIGHTS, load_drafter
from specgraft.evaluate import metrics, predicted
from specgraft.evaluate.examples import examples
from specgraft.evaluate.lossless import compare
from specgraft.evaluate.scheduled import lines, scaling, scheduled, write_scalings
from specgraft.evaluate.speed import measure
from specgraft.log import progress, say
from specgraft.records import Conversation, read_conversations
from specgraft.run_dir import RunDir, write_json
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate
from specgraft.targets.load import digest, load_target
from specgraft.targets.sampling import Law, uniforms


def load_pair(config: RunConfig, drafter_folder: Path, dtype: str) -> Pair:
    """Target and drafter at one precision. Raises ValueError where they do not belong together."""
    target = load_target(config.target.id, dtype, config.run.device, config.target.remote_code)
    drafter = load_drafter(drafter_folder, target.device)
    return pair(target, at_precision(drafter, target.dtype))


def held_out(config: RunConfig, run: RunDir, prompts: Sequence[str] | None = None) -> list[Conversation]:
    """The held-out conversations, in the order of `prompts` (ids) where given: a folder may hold answers to prompts that the
    run has left since. Raises ValueError when there are too few."""
    found = [c for c in read_conversations(run.regen) if c.split == "heldout"]
    if prompts is not None:
        by_id = {c.prompt_id: c for c in found}
        found = [by_id[name] for name in prompts if name in by_id]
    wanted = max(config.evaluate.prompts, config.evaluate.sampled_prompts, config.evaluate.speed_prompts)
    if len(found) < wanted:
        raise ValueError(
            f"{run.regen}: {len(found)} held-out conversations, {wanted} are to be evaluated: run regen, or lower evaluate.prompts"
        )
    return found


def prompt_of(conversation: Conversation) -> list[int]:
    return conversation.input_ids[: conversation.prompt_length]


def evaluate(config: RunConfig, run: RunDir, drafter_folder: Path, prompts: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures a drafter on the held-out conversations (of these prompts) and writes evaluate.json, whole. Returns it."""
    began = time.monotonic()
    part = config.evaluate
    conversations = held_out(config, run, prompts)
    both = load_pair(config, drafter_folder, part.dtype)
    if part.schedule != "fixed" and both.drafter.confidence_head is None:
        raise ValueError(f"evaluate.schedule={part.schedule} needs a drafter with a confidence head: evaluate.schedule=fixed")
    greedy = conversations[: part.prompts]
    requests = decoded(both, greedy, config, 0.0)
    result: dict[str, Any] = {
        "settings": {
            "dtype": part.dtype,
            "draft_tokens": both.drafter.config.draft_tokens,
            "max_new_tokens": part.max_new_tokens,
            "prompts": part.prompts,
            "sampled_prompts": part.sampled_prompts,
            "batch": part.batch,
            "seed": config.run.seed,
            "target": config.target.id,
            "device": str(both.target.device),
            "checkpoint": str(drafter_folder),
            "weights": digest(drafter_folder / WEIGHTS),
            "evaluate": part.model_dump(mode="json"),
            "bonus_included": True,
        },
        "t0": {**accept_table(both, greedy, requests, 0.0), "lossless": lossless(both, greedy, requests, config)},
    }
    confident, by_temperature = requests, {0.0: requests}
    sampled = conversations[: part.sampled_prompts]
    if sampled:
        confident = by_temperature[1.0] = decoded(both, sampled, config, 1.0)
        result["t1"] = accept_table(both, sampled, confident, 1.0)
    if both.drafter.confidence_head is not None:
        result["confidence"] = {
            "temperature": 1.0 if part.sampled_prompts else 0.0,
            **metrics.confidence_table(
                [verdict for request in confident for verdict in request.rounds],
                [row for request in confident for row in request.confidence],
            ),
            "scaling": scaling(by_temperature, both.drafter.config.draft_tokens),
        }
        write_scalings(run.confidence, result["confidence"]["scaling"], result["settings"]["weights"])
        if part.schedule != "fixed":
            result["scheduled"] = scheduled(
                both,
                config,
                result["confidence"]["scaling"],
                by_temperature,
                lambda scheduler, temperature: decoded(both, sampled if temperature else greedy, config, temperature, scheduler),
            )
    result["examples"] = examples(both.target.tokenizer, greedy, requests, part.examples)
    if part.speed_prompts:
        result["speed"] = speed(config, drafter_folder, conversations[: part.speed_prompts], both)
    result["seconds"] = time.monotonic() - began
    write_json(run.evaluation, result)
    t0 = result["t0"]
    say(
        f"evaluate: accept length {_shown(t0['accept_length'])} (pooled {_shown(t0['accept_length_pooled'])}, predicted "
        f"{_shown(t0['predicted_accept_length'])}) at T=0; lossless: {t0['lossless']['mismatches']} mismatches, "
        f"{t0['lossless']['ties']} ties on {t0['lossless']['prompts']} prompts"
    )
    for line in lines(result.get("scheduled", {})):
        say(line)
    return result


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def decoded(
    both: Pair,
    conversations: Sequence[Conversation],
    config: RunConfig,
    temperature: float,
    scheduler: Scheduler | None = None,
) -> list[Request]:
    """The prompts continued with the drafter."""
    part = config.evaluate
    count = uniform_count(part.max_new_tokens, both.drafter.config.draft_tokens)
    requests = [
        Request(
            prompt_of(conversation),
            part.max_new_tokens,
            Law(temperature),
            uniforms(config.run.seed, f"evaluate:{conversation.prompt_id}", count) if temperature > 0 else None,
        )
        for conversation in conversations
    ]
    with progress(f"evaluate T={temperature:g}", len(requests)) as bar:
        decode(both, requests, part.batch, _rate(bar.at), scheduler=scheduler)
    return requests


def _rate(at: Callable[[int, str], None]) -> Callable[[int, int], None]:
    began = time.monotonic()

    def shown(finished: int, tokens: int) -> None:
        at(finished, f"{tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s")

    return shown


def accept_table(
    both: Pair, conversations: Sequence[Conversation], requests: Sequence[Request], temperature: float
) -> dict[str, Any]:
    """Accept length and friends of one temperature, the prediction for the same texts, and how far the two agree."""
    rounds = [request.rounds for request in requests]
    every = [verdict for mine in rounds for verdict in mine]
    size = both.drafter.config.draft_tokens
    found = []
    with progress(f"predict T={temperature:g}", len(requests)) as bar:
        for number, request in enumerate(requests, 1):
            found.append(predicted.predict(both, request.ids, request.output, Law(temperature)))
            bar.at(number)
    expected, pooled = predicted.pooled(found), metrics.accept_length_pooled(rounds)
    return {
        "temperature": temperature,
        "accept_length": metrics.accept_length(rounds),
        "accept_length_pooled": pooled,
        "rounds": len(every),
        "tokens": metrics.committed(every),
        "requests": len(requests),
        "survival": metrics.survival(every, size),
        "conditional": metrics.conditional(every, size),
        "by_domain": metrics.table_by([c.domain for c in conversations], rounds),
        "by_language": metrics.table_by([c.language for c in conversations], rounds),
        "predicted_accept_length": expected,
        "agreement": None if expected is None or pooled is None else abs(expected - pooled) / pooled,
        "per_request": [
            {
                "prompt_id": c.prompt_id,
                "language": c.language,
                "domain": c.domain,
                "rounds": len(request.rounds),
                "tokens": metrics.committed(request.rounds),
                "finish_reason": request.finish_reason,
            }
            for c, request in zip(conversations, requests, strict=True)
        ],
    }


def lossless(
    both: Pair, conversations: Sequence[Conversation], requests: Sequence[Request], config: RunConfig
) -> dict[str, Any]:
    """Plain decoding of the same prompts at the same precision, compared token by token."""
    part = config.evaluate
    plain = [PlainRequest(request.ids, part.max_new_tokens) for request in requests]
    with progress("evaluate plain", len(plain)) as bar:
        generate(both.target, plain, part.batch, _rate(bar.at))
    return compare(
        both.target,
        [request.ids for request in requests],
        [request.output for request in plain],
        [request.output for request in requests],
        [conversation.prompt_id for conversation in conversations],
    )


def speed(config: RunConfig, drafter_folder: Path, conversations: Sequence[Conversation], both: Pair) -> dict[str, Any]:
    """The `speed` section: T=0 and T=1 at `evaluate.speed_dtype`."""
    part = config.evaluate
    if both.target.dtype != getattr(torch, part.speed_dtype):
        both = load_pair(config, drafter_folder, part.speed_dtype)
    prompts = [prompt_of(conversation) for conversation in conversations]
    out: dict[str, Any] = {"dtype": part.speed_dtype, "prompts": len(prompts), "threads": torch.get_num_threads()}
    with progress("evaluate speed", 2 * len(prompts)) as bar:
        for name, temperature in (("t0", 0.0), ("t1", 1.0)):
            out[name] = measure(
                both, prompts, part.max_new_tokens, temperature, config.run.seed, lambda: bar.at(bar.done + 1)
            )
    return out
