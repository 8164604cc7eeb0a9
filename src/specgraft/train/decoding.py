"""Real accept length at a checkpoint: held-out prompts decoded with the drafter as it is. By this number the best one is kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specgraft.config import RunConfig
from specgraft.distill.ranks import total
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.precision import at_precision
from specgraft.drafters.registry import build
from specgraft.evaluate.measured_pair import round_sums
from specgraft.records import Conversation
from specgraft.run_dir import RunDir, write_json
from specgraft.targets.model import Target
from specgraft.train.checkpoint import BEST, decoded
from specgraft.train.parallel.group import Group
from specgraft.train.parallel.sharded import weights
from specgraft.train.shares import share_out


def measured(
    config: RunConfig, target: Target, drafter: Drafter, held_out: Sequence[Conversation], group: Group, sharded: bool
) -> dict[str, Any]:
    """Accept length at temperature 0 over `train.decode_prompts` prompts, shared out over the ranks; bonus included.

    `accept_length` is the mean over requests, `accept_length_pooled` all tokens over all rounds.
    """
    chosen = held_out[: config.train.decode_prompts]
    limit = config.evaluate.max_new_tokens
    own = share_out([len(c.input_ids) for c in chosen], group.size)[group.rank]
    plain = at_precision(unsharded(drafter) if sharded else copy.deepcopy(drafter).requires_grad_(False), target.dtype)
    prompts = [chosen[place].input_ids[: chosen[place].prompt_length] for place in own]
    sums = group.alike(lambda: round_sums(target, plain.eval(), prompts, limit, config.evaluate.batch))
    ratios, requests, tokens, rounds = total(torch.tensor(sums, dtype=torch.float64)).tolist()
    return {
        "prompts": len(chosen), "accept_length": ratios / max(requests, 1), "accept_length_pooled": tokens / max(rounds, 1),
        "rounds": int(rounds),
    }  # fmt: skip


def unsharded(drafter: Drafter) -> Drafter:
    """A whole copy of a drafter of which every rank holds a part."""
    found = build(drafter.config)
    found.load_state_dict(weights(drafter))
    device = next(iter(drafter.parameters())).device
    return found.to(device).requires_grad_(False)


def remember(run: RunDir, step: int, found: dict[str, Any]) -> None:
    """Adds what was measured at a step to best.json, beside the checkpoints."""
    known = {**decoded(run.checkpoints), step: found}
    write_json(run.checkpoints / BEST, {"decoded": {str(step): known[step] for step in sorted(known)}})


def forget(run: RunDir, first: int) -> None:
    """Leaves out what was measured behind step `first`, which is made again."""
    known = decoded(run.checkpoints)
    if any(step > first for step in known):
        write_json(run.checkpoints / BEST, {"decoded": {str(step): found for step, found in known.items() if step <= first}})
