"""`regen`: prompts -> Conversations answered by the target.

Prompts are answered in groups; a finished group is one file, written whole. After a kill the unfinished group is
answered again from its start, so the ids do not depend on when the run was stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from specgraft.config import RunConfig
from specgraft.log import progress, say
from specgraft.records import Conversation, Prompt, ids_digest, read_conversations
from specgraft.regen.mix import chosen_prompts
from specgraft.regen.render import render
from specgraft.run_dir import RunDir, read_json, write_json, write_text
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import identity
from specgraft.targets.model import Target
from specgraft.targets.sampling import uniforms


def temperature_of(config: RunConfig, prompt_id: str, split: str) -> float:
    """Held-out prompts are answered greedily; of the train prompts a share, picked by hash of the id, is too."""
    if split == "heldout" or config.regen.temperature == 0:
        return 0.0
    value = int.from_bytes(hashlib.sha256(f"greedy:{prompt_id}".encode()).digest()[:4], "big") / 2**32
    return 0.0 if value < config.regen.greedy_share else config.regen.temperature


def settings(config: RunConfig, target: Target) -> dict[str, object]:
    """What the answers depend on; kept beside them, and compared when a run goes on."""
    keep = ("temperature", "greedy_share", "top_p", "top_k", "max_new_tokens", "batch", "group")
    return {
        "target": identity(target),
        "regen": {key: value for key, value in config.regen.model_dump().items() if key in keep},
        "seed": config.run.seed,
        "source": config.prompts.source,
        "held_out_share": config.prompts.held_out_share,
    }


def check_settings(path: Path, now: dict[str, object], what: str, any_there: bool) -> None:
    """Writes `now` where nothing is there yet; refuses to mix with answers of another target or other settings."""
    if not any_there:
        write_json(path, now)
        return
    before = read_json(path)
    for key, value in now.items():
        if before.get(key) != value:
            raise ValueError(
                f"{path.parent}: holds {what} made with another `{key}`; use another run.name, or delete that folder"
            )


def regen(config: RunConfig, run: RunDir, target: Target) -> list[Conversation]:
    """Answers what has no answer yet and returns all conversations of the run, train first."""
    prompts = chosen_prompts(config, run)
    for path in run.regen.glob(".*.tmp"):
        path.unlink()
    have = {c.prompt_id: c for c in read_conversations(run.regen)}
    # every prompt of both splits is rendered before the first is answered: a bad one costs no work
    waiting = {split: [prompt for prompt in prompts[split] if prompt.id not in have] for split in prompts}
    rendered = {split: rendered_prompts(config, target, waiting[split]) for split in waiting}
    check_settings(run.regen / "settings.json", settings(config, target), "answers", bool(have))
    for split in ("train", "heldout"):
        for conversation in _answer(config, run, target, split, waiting[split], rendered[split]):
            have[conversation.prompt_id] = conversation
    wanted = [have[prompt.id] for split in ("train", "heldout") for prompt in prompts[split]]
    cut = sum(c.finish_reason == "length" for c in wanted)
    tokens = sum(sum(c.loss_mask) for c in wanted)
    say(
        f"regen: {len(wanted)} answers, {tokens} tokens; {cut} of {len(wanted)} cut at "
        f"{config.regen.max_new_tokens} tokens ({cut / len(wanted):.0%})"
    )
    return wanted


def rendered_prompts(config: RunConfig, target: Target, prompts: list[Prompt]) -> list[list[int]]:
    """Ids of every prompt. Raises ValueError naming the first one that cannot be answered."""
    rendered = [render(target.tokenizer, prompt, config.prompts.max_tokens) for prompt in prompts]
    limit = getattr(target.config, "max_position_embeddings", None)
    longest = max(map(len, rendered), default=0) + config.regen.max_new_tokens
    if limit and longest > limit:
        raise ValueError(f"prompt and answer may take {longest} tokens, the target's context is {limit}: lower regen.max_new_tokens")
    return rendered


def _answer(
    config: RunConfig, run: RunDir, target: Target, split: str, waiting: list[Prompt], rendered: list[list[int]]
) -> Iterator[Conversation]:
    if not waiting:
        return
    part = config.regen
    free = (path for number in count() if not (path := run.regen / f"{split}-{number:05d}.jsonl").exists())
    with progress(f"regen {split}", len(waiting)) as bar:
        for start in range(0, len(waiting), part.group):
            group = waiting[start : start + part.group]
            requests = []
            for prompt, ids in zip(group, rendered[start : start + part.group], strict=True):
                temperature = temperature_of(config, prompt.id, split)
                uniform = uniforms(config.run.seed, prompt.id, part.max_new_tokens) if temperature > 0 else None
                requests.append(Request(ids, part.max_new_tokens, temperature, part.top_p, part.top_k, uniform))
            began = time.monotonic()

            def shown(finished: int, tokens: int, start: int = start, began: float = began) -> None:
                bar.at(start + finished, f"{tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s")

            generate(target, requests, part.batch, shown)
            done = [_conversation(prompt, request, split) for prompt, request in zip(group, requests, strict=True)]
            text = "".join(json.dumps(conversation.to_json()) + "\n" for conversation in done)
            write_text(next(free), text)
            yield from done


def _conversation(prompt: Prompt, request: Request, split: str) -> Conversation:
    return Conversation(
        prompt_id=prompt.id,
        family=prompt.family,
        language=prompt.language,
        domain=prompt.domain,
        split=split,
        input_ids=request.ids + request.output,
        loss_mask=[False] * len(request.ids) + [True] * len(request.output),
        prompt_length=len(request.ids),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        finish_reason=request.finish_reason,
        digest=ids_digest(request.output),
    )
