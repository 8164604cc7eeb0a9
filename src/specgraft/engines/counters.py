"""What an engine counted of its speculation, read from its Prometheus page. No torch.

Sources: llama.cpp b11434 (`llamacpp:spec_decode_*`), vLLM 0.32 (`vllm:spec_decode_*`). SGLang counts per request (`streaming`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = {"llamacpp": "llamacpp:spec_decode_", "vllm": "vllm:spec_decode_"}
LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[-+.\deE]+|NaN)")
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """Sums since the server started, or their difference. Filled by `read_counters`."""

    steps: int  # verify passes of a request
    drafted: int  # draft tokens verified
    accepted: int  # of these
    by_position: tuple[int, ...] = ()  # accepted at draft 1, 2, ..

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`. Raises ValueError where a counter fell: the server was started anew in between."""
        longer = (*before.by_position, *[0] * (len(self.by_position) - len(before.by_position)))
        found = Counters(
            self.steps - before.steps,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.by_position, longer, strict=True)),
        )
        if min(found.steps, found.drafted, found.accepted) < 0:
            raise ValueError("the server's counters fell: it was started anew while it was measured; run bench again")
        return found

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per verify pass, bonus included, pooled; None without a pass."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def survival(self) -> list[float]:
        """Share of passes that accepted at least j drafts, j = 1, 2, .."""
        return [count / self.steps for count in self.by_position] if self.steps else []


def read_counters(engine: str, page: str) -> Counters | None:
    """The counters on a metrics page, summed over its label sets; None for an engine that has none there, or serves no drafter."""
    prefix = PREFIX.get(engine)
    if prefix is None:
        return None
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in page.splitlines():
        match = LINE.match(line)
        if not match or not match["name"].startswith(prefix) or match["value"] == "NaN":
            continue
        name, value = match["name"].removeprefix(prefix), float(match["value"])
        if name == "num_accepted_tokens_per_pos_total":
            place = POSITION.search(match["labels"] or "")
            if place:
                positions[int(place[1])] = positions.get(int(place[1]), 0) + value
        else:
            sums[name] = sums.get(name, 0) + value
    if "num_drafts_total" not in sums:
        return None
    by_position = tuple(round(positions.get(place, 0)) for place in range(max(positions, default=-1) + 1))
    return Counters(
        round(sums["num_drafts_total"]), round(sums.get("num_draft_tokens_total", 0)), round(sums.get("num_accepted_tokens_total", 0)), by_position
    )
