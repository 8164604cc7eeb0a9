"""What a run would start where, and what travels between: arithmetic on its run file, nothing is started or loaded."""

from __future__ import annotations

from collections.abc import Iterator

from specgraft.config import RunConfig
from specgraft.plan.storage import of_config, size_text, widths

MEDIA = {
    "disk": "shards that `specgraft capture` wrote before",
    "memory": "made while training; nothing is written",
    "hybrid": "made at first use, and kept as shards",
    "ray": "made while training by Ray actors",
}


def refuse_ranks(config: RunConfig, ranks: int) -> None:
    """Raises ValueError where the rows of a step cannot be shared out evenly."""
    if config.train.rows % ranks:
        raise ValueError(f"--ranks {ranks}: train.rows={config.train.rows} is no multiple of it, so ranks would do unequal work")


def layout(config: RunConfig, ranks: int = 1, speed: float = 0.0, hidden: int = 0) -> Iterator[str]:
    """Lines for the terminal. `speed`: tokens that all ranks take in a second, 0 where nobody has measured it.

    Raises ValueError where the target's hidden size is not known, or the settings do not fit so many ranks.
    """
    part, capture = config.stream, config.capture
    hidden, streams = widths(config.target.id, hidden)
    one = of_config(config, (hidden, streams), 1, 1)
    token, taps, dtype = one.bytes_per_token, one.taps, one.dtype
    refuse_ranks(config, ranks)
    yield f"features   {MEDIA[part.medium]}{', and kept as shards' if part.keep else ''}"
    if part.medium == "ray":
        where = f"the cluster at {part.address}" if part.address else "a cluster of this machine, on loopback, started and ended with the run"
        yield f"producers  {part.producers} Ray actors on {where}: {part.cpus:g} CPUs and {part.gpus:g} GPUs each, {part.producers * part.gpus:g} GPUs in all"
        yield f"           each loads {config.target.id} in {config.target.dtype}; started again {part.retries} times, then the run stops"
        if ranks > 1 and not part.address:
            yield "           several ranks need stream.address: start a cluster with `ray start --head` and name it"
    elif part.medium != "disk":
        here = f"one thread of {'each rank' if ranks > 1 else 'the trainer'}, with the target {config.target.id}"
        yield f"producers  {', '.join(capture.servers) or here}"
    borrowed = "embedding, head and final norm only" if part.medium == "ray" or capture.target == "outer" else "the whole target"
    share = config.train.rows // ranks
    yield f"trainer    {ranks} rank{'s' if ranks > 1 else ''}, {share} row{'s' if share > 1 else ''} of a step each; loads of the target: {borrowed}"
    yield f"a token    {token} bytes: {taps} taps and the last layer of {hidden} in {dtype}, id, mask"
    if part.medium != "disk":
        rows = part.bound_mb * 1e6 / token
        yield f"queue      {part.bound_mb:g} MB for a rank, about {rows:,.0f} tokens; {size_text(int(ranks * part.bound_mb * 1e6))} in all"
    step = config.train.rows * config.train.max_length
    yield f"a step     {step:,} tokens at most, {size_text(step * token)}"
    if speed:
        yield f"network    {size_text(int(speed * token))} per second at {speed:,.0f} tokens per second"
    else:
        yield "network    --tokens-per-second gives bytes per second: take tokens per second from metrics.jsonl of a run, or a benchmark"
    if config.distill.origin == "branches":
        width = config.drafters.draft_tokens - 1
        nodes = config.train.rows * config.train.anchors * config.distill.branches_per_anchor * width
        state = hidden * streams * {"float32": 4}.get(config.target.dtype, 2)
        yield f"branches   {nodes:,} nodes a step at most, {size_text(nodes * state)} of states come back; no weight of the drafter travels"
