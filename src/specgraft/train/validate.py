"""Teacher-forced accept length on held-out text: cheap, in the loop. The decode-measured one decides, not this.

Legend: B rows, N anchors, G draft tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specgraft.config import RunConfig
from specgraft.distill.ranks import total
from specgraft.distill.statistics import slot_statistics
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.stream.source import Source
from specgraft.train.batch import Among, collate, step_generator
from specgraft.train.parallel.group import Group
from specgraft.train.parallel.module import Stepper
from specgraft.train.shares import share_out, stand_in


def survival(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """Mean over anchors of the prefix products of `values`, per slot, over the blocks where that slot is supervised."""
    products = values.cumprod(-1)
    count = total(mask.sum((0, 1))).clamp(min=1)
    return (total((products * mask).sum((0, 1))) / count).tolist()


def validation(
    config: RunConfig, drafter: Drafter, shared: Shared, source: Source, stepper: Stepper, group: Group
) -> dict[str, Any]:
    """Survival of greedy hits on held-out answers (greedy text), anchors drawn uniformly; `answers` says whose they are.

    Every rank takes a share of every batch, as many passes as the others.
    """
    part, size = config.train, config.drafters.draft_tokens
    kind, count = getattr(torch, part.compute), min(part.validate_rows, len(source.ids))
    lengths = [min(tokens, part.max_length) for tokens in source.lengths[:count]]
    batches = [lengths[start : start + part.rows] for start in range(0, count, part.rows)]
    shares = [share_out(batch, group.size)[group.rank] for batch in batches]
    order = [number * part.rows + place for number, share in enumerate(shares) for place in share]
    found = group.alike(lambda: list(source.rows(order)))
    there = {index: row for index, row in zip(order, found, strict=True) if row is not None}
    values, masks = [torch.zeros(2, 1, 0, size, device=shared.head.device)], [torch.zeros(1, 0, size, dtype=torch.bool, device=shared.head.device)]
    for number, (batch, share) in enumerate(zip(batches, shares, strict=True)):
        first = number * part.rows
        places = [place for place in share if first + place in there]
        if places:
            generator = step_generator(config.run.seed, first, "anchors")
            rows = [there[first + place] for place in places]
            mine = collate(rows, part.anchors, size, part.max_length, generator, shared.head.device, among=Among(batch, places))
        elif stepper.sharded:
            mine = stand_in(drafter.config, torch.float32, shared.head.device)
        else:
            continue
        statistics = stepper.count(partial(slot_statistics, drafter, shared, mine, kind, config.distill.chunk_rows))
        values.append(torch.stack([each.flatten(0, 1) for each in statistics]).view(2, 1, -1, size))
        masks.append(mine.anchors.mask.view(1, -1, size))
    stepper.rest()
    every, mask = torch.cat(values, 2), torch.cat(masks, 1)
    alpha_survival, hit_survival = survival(every[0], mask), survival(every[1], mask)
    whose = "target" if config.regen.answers == "target" else "data set"  # figures of the two are not to be compared
    return {
        "answers": whose, "survival": hit_survival, "accept_length": 1 + sum(hit_survival), "alpha_survival": alpha_survival,
        "alpha_accept_length": 1 + sum(alpha_survival),
    }  # fmt: skip
