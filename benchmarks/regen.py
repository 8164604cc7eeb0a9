"""Regeneration throughput: batched against one prompt at a time, same prompts, same process.

    python benchmarks/regen.py [--target smollm2] [--prompts 64] [--single 4] [--tokens 64] [--repeats 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from specgraft.regen.prompts import builtin_prompts
from specgraft.regen.render import render
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--single", type=int, default=4, help="prompts of the one-at-a-time run")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    ids = [render(target.tokenizer, prompt, 4096) for prompt in builtin_prompts(args.prompts)]

    def rate(some: list[list[int]], batch: int) -> float:
        requests = [Request(one, args.tokens) for one in some]
        began = time.perf_counter()
        if batch == 1:
            for request in requests:
                generate(target, [request], 1)
        else:
            generate(target, requests, batch)
        return sum(len(request.output) for request in requests) / (time.perf_counter() - began)

    rate(ids[:2], 2)
    runs = [{"batched": rate(ids, args.batch), "single": rate(ids[: args.single], 1)} for _ in range(args.repeats)]
    for run in runs:
        run["ratio"] = run["batched"] / run["single"]
    result = {name: statistics.median(run[name] for run in runs) for name in ("batched", "single", "ratio")}
    result = {"batched_tokens_per_second": result["batched"], "single_tokens_per_second": result["single"], "ratio": result["ratio"]}
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps({**result, "runs": runs, "settings": {**vars(args), "json": str(args.json)}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
