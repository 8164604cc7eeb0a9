"""The same prompts answered greedily in this process and by a server of the same weights: identical ids, ties, speed.

    python benchmarks/regen_servers.py recipes/smollm2.toml --engine llamacpp [--prompts 200] [--tokens 48] [--json PATH]

Both sides run with `--dtype` weights (float32: what differs is the order of sums alone). Where a row differs, the target's own
logits at that place say by how much the one token is likelier than the other: a gap within float error is a tie.
`--reference PATH` keeps this process's answers for a second engine. Engines: `make engines`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraft.config import RunConfig
from specgraft.engines.client import Ask, Pool, Reply
from specgraft.engines.process import free_port
from specgraft.engines.serve import Serving
from specgraft.run_file import read_arguments
from specgraft.targets.text import load_text, resolve

TIE = 1e-3  # logits; float32 sums in another order move them by about 1e-5 on the embedded target


def asks_of(config: RunConfig, number: int, tokens: int) -> list[Ask]:
    """The first prompts of the mix, train then held-out, as the target's template renders them."""
    from specgraft.regen.mix import chosen_prompts
    from specgraft.regen.render import Chat

    text = load_text(config.target.id, config.target.remote_code)
    chat = Chat(text.tokenizer, text.end_ids, config.regen.thinking)
    prompts = [prompt for split in chosen_prompts(config).values() for prompt in split][:number]
    return [Ask(chat.prompt(prompt.messages, prompt.tools), tokens, stop_ids=text.end_ids) for prompt in prompts]


def in_process(target: Any, asks: Sequence[Ask], batch: int) -> dict[str, Any]:
    from specgraft.targets.generate import Request, generate

    requests = [Request(ask.ids, ask.max_new_tokens) for ask in asks]
    generate(target, [Request(asks[0].ids, 2)], 1)
    began, used = time.perf_counter(), time.process_time()
    generate(target, requests, batch)
    rows = [[request.output, request.finish_reason] for request in requests]
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used, "rows": rows}


def cpu_seconds(group: int) -> float:
    """Processor time of a server and its workers so far: on a busy machine it says more than the clock on the wall. Linux."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(words[2]) == group:  # counted from the process's state: 2 its group, 11 and 12 its user and system ticks
            total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def by_server(serving: Serving, asks: Sequence[Ask], limit: float) -> dict[str, Any]:
    found: dict[int, Reply] = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with serving.process(Path(folder) / "server.log", limit) as server:
            ready = time.perf_counter() - began
            pool = Pool([server.url], serving.engine, concurrency=serving.parallel, timeout=limit)
            pool.run([Ask(asks[0].ids, 2, stop_ids=asks[0].stop_ids)], lambda index, reply: None)
            assert server.child is not None
            began, used = time.perf_counter(), cpu_seconds(server.child.pid)
            pool.run(asks, found.__setitem__)
            seconds, cpu = time.perf_counter() - began, cpu_seconds(server.child.pid) - used
    rows = [[found[index].ids, found[index].finish_reason] for index in range(len(asks))]
    return {"seconds": seconds, "cpu": cpu, "ready": ready, "rows": rows}


def difference(target: Any, ask: Ask, ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """First place at which two answers part, and what the target's logits say there."""
    import torch

    place = next((place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if place is None:
        return {"place": min(len(ours), len(theirs)), "gap": None}
    ids = torch.tensor([ask.ids + ours[:place]], device=target.device)
    with torch.inference_mode():
        logits = target.logits(target.forward(ids, target.cache(1, ids.shape[1] + 1)).last[0, -1]).double()
    return {
        "place": place,
        "ours": ours[place],
        "theirs": theirs[place],
        "gap": float(logits[ours[place]] - logits[theirs[place]]),
        "rank": int((logits > logits[theirs[place]]).sum()),
    }


def compare(target: Any, asks: Sequence[Ask], ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(asks, ours["rows"], theirs["rows"], strict=True))
    differing = [
        {"row": row, **difference(target(), ask, one[0], other[0])} for row, (ask, one, other) in enumerate(pairs) if one != other
    ]
    tokens = {name: sum(len(ids) for ids, _ in side["rows"]) for name, side in (("ours", ours), ("theirs", theirs))}
    return {
        "rows": len(pairs),
        "identical": len(pairs) - len(differing),
        "ties": sum(row["gap"] is not None and abs(row["gap"]) <= TIE for row in differing),
        "differing": differing,
        "ended": sum(reason == "stop" for _, reason in theirs["rows"]),
        "tokens": tokens,
        "tokens_per_second": {"in_process": tokens["ours"] / ours["seconds"], "server": tokens["theirs"] / theirs["seconds"]},
        "tokens_per_cpu_second": {"in_process": tokens["ours"] / ours["cpu"], "server": tokens["theirs"] / theirs["cpu"]},
        "ready_seconds": theirs["ready"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="run file, then overrides")
    parser.add_argument("--engine", choices=["llamacpp", "vllm", "sglang"], required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--parallel", type=int, default=8, help="requests decoded together, on both sides")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for the server's start, and for one request")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = read_arguments(args.run)
    asks = asks_of(config, args.prompts, args.tokens)
    loaded: list[Any] = []

    def target() -> Any:
        if not loaded:
            from specgraft.targets.load import load_target

            loaded.append(load_target(config.target.id, args.dtype, "cpu"))
        return loaded[0]

    key = hashlib.sha256(repr((config.target.id, args.dtype, args.parallel, asks)).encode()).hexdigest()
    kept = json.loads(args.reference.read_text()) if args.reference and args.reference.is_file() else {}
    ours = kept if kept.get("key") == key else {"key": key, **in_process(target(), asks, args.parallel)}
    if args.reference:
        args.reference.write_text(json.dumps(ours) + "\n")
    loaded.clear()
    longest = max(len(ask.ids) for ask in asks) + args.tokens + 1
    model = Path(resolve(config.target.id))
    serving = Serving(args.engine, model, free_port(), dtype=args.dtype, context=longest + 15, parallel=args.parallel, threads=args.threads)
    result = compare(target, asks, ours, by_server(serving, asks, args.limit))
    speed, work = result["tokens_per_second"], result["tokens_per_cpu_second"]
    print(f"{args.engine}, {args.dtype}: {result['identical']} of {result['rows']} rows identical, {len(result['differing'])} differ, of these {result['ties']} at ties (gap <= {TIE:g})")
    for row in result["differing"]:
        print("  " + " ".join(f"{name}={value}" for name, value in row.items()))
    print(f"tokens/s: {speed['in_process']:.0f} in process, {speed['server']:.0f} by the server; per second of processor time: {work['in_process']:.0f} and {work['server']:.0f}")
    print(f"{result['ended']} of {result['rows']} ended; ready after {result['ready_seconds']:.0f} s")
    if args.json:
        args.json.write_text(json.dumps({**result, "settings": {name: str(value) for name, value in vars(args).items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
