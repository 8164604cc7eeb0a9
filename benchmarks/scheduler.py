"""Verification by schedule against all drafts, at this machine's profiled costs: tokens per second, alternating in one process.

    python benchmarks/scheduler.py RUN [--rows 1 4 16] [--temperatures 0 1] [--repeats 5] [--cpu] [--json PATH]

RUN is the folder of a run that was trained and evaluated (held-out prompts, newest checkpoint, confidence.json; without that
file the confidences are calibrated here, on prompts that are not timed). Prefill is not counted, it is the same for all. `--cpu` counts CPU
seconds of one thread in place of wall time, for a machine that others use at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specgraft.decode import loop
from specgraft.decode.costs import Costs
from specgraft.decode.loop import Request, Timing, decode, uniform_count
from specgraft.decode.pair import Pair, pair
from specgraft.decode.profile import profile
from specgraft.decode.scheduler import NAMES, make
from specgraft.drafters.precision import at_precision
from specgraft.drafters.store import load_drafter
from specgraft.evaluate.scheduled import read_scalings, scaling, scalings_of
from specgraft.records import read_conversations
from specgraft.run_dir import RunDir
from specgraft.targets.load import load_target
from specgraft.targets.sampling import Law, uniforms

WAYS = tuple(name for name in NAMES if name != "fixed")


def requests_of(pair: Pair, prompts: list[list[int]], new: int, temperature: float, seed: int) -> list[Request]:
    count = uniform_count(new, pair.drafter.config.draft_tokens)
    return [
        Request(ids, new, Law(temperature), uniforms(seed, str(number), count) if temperature else None)
        for number, ids in enumerate(prompts)
    ]


def once(
    pair: Pair, prompts: list[list[int]], rows: int, new: int, temperature: float, seed: int, name: str, how: Any
) -> dict[str, float]:
    """One schedule over the prompts, `rows` at a time."""
    requests, timing = requests_of(pair, prompts, new, temperature, seed), Timing()
    decode(pair, requests, rows, timing=timing, scheduler=None if name == "fixed" else make(name, *how))
    seconds = sum(spent for _, _, _, spent in timing.passes)
    rounds = [verdict for request in requests for verdict in request.rounds]
    tokens = sum(len(verdict.committed) for verdict in rounds)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "accept_length": tokens / len(rounds),
        "drafts_verified": sum(verdict.proposed for verdict in rounds) / len(rounds),
        "passes": timing.rounds,
    }


def compare(
    pair: Pair, prompts: list[list[int]], rows: int, temperature: float, scalings: dict, costs: Costs, args: argparse.Namespace
) -> dict[str, Any]:
    """All schedules `repeats` times, each repeat on fresh draws; ratios within a repeat, so a slow minute is slow for all."""
    how = (scalings, costs, args.threshold)
    mine = prompts[: max(args.prompts, rows)]
    runs: list[dict[str, dict[str, float]]] = []
    for repeat in range(args.repeats):
        order = [*NAMES[repeat % len(NAMES) :], *NAMES[: repeat % len(NAMES)]]
        found = {name: once(pair, mine, rows, args.new, temperature, repeat, name, how) for name in order}
        runs.append(found)
    rate = {name: statistics.median(run[name]["tokens_per_second"] for run in runs) for name in NAMES}
    return {
        "rows": rows,
        "temperature": temperature,
        "tokens_per_second": rate,
        "over_fixed": {
            name: statistics.median(run[name]["tokens_per_second"] / run["fixed"]["tokens_per_second"] for run in runs)
            for name in WAYS
        },
        "drafts_verified": {name: statistics.mean(run[name]["drafts_verified"] for run in runs) for name in NAMES},
        "accept_length": {name: statistics.mean(run[name]["accept_length"] for run in runs) for name in NAMES},
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threshold", type=float, default=0.3)
    parser.add_argument("--prompts", type=int, default=8, help="at the least; as many as rows where that is more")
    parser.add_argument("--fit-prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="+", default=[96, 384], help="lengths at which rounds are profiled")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--costs", type=Path, help="read profiled costs from here, or leave them here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cpu:
        torch.set_num_threads(1)
        loop.clock = time.process_time
    run = RunDir(args.run)
    target = load_target(json.loads(run.config.read_text())["target"]["id"], args.dtype)
    folder = args.checkpoint or sorted(run.checkpoints.glob("step-*"))[-1]
    both = pair(target, at_precision(load_drafter(folder, target.device), target.dtype))
    held = [c.input_ids[: c.prompt_length] for c in read_conversations(run.regen) if c.split == "heldout"]
    most = max(args.prompts, *args.rows)
    prompts, others = held[:most], held[most : most + args.fit_prompts]
    if run.confidence.exists():
        scalings = read_scalings(run.confidence)
    else:
        fitted = {}
        for temperature in args.temperatures:
            fitted[temperature] = requests_of(both, others, 128, temperature, 1_000_000)
            decode(both, fitted[temperature], 16)
        found = scaling(fitted, both.drafter.config.draft_tokens)
        scalings = scalings_of(found.values())
    known = json.loads(args.costs.read_text()) if args.costs and args.costs.exists() else {}
    results = []
    for temperature in args.temperatures:
        if str(temperature) not in known:
            table = profile(both, others, sorted({1, *args.rows}), args.contexts, Law(temperature), args.repeats)
            known[str(temperature)] = table.to_json()
            if args.costs:
                args.costs.write_text(json.dumps(known, indent=2) + "\n")
        costs = Costs.from_json(known[str(temperature)])
        for rows in args.rows:
            results.append(compare(both, prompts, rows, temperature, scalings, costs, args))
            print(json.dumps({key: value for key, value in results[-1].items() if key != "runs"}), flush=True)
    if args.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        about = {"settings": settings, "threads": torch.get_num_threads(), "scalings": {law: vars(scaling) for law, scaling in scalings.items()}, "costs": known}
        args.json.write_text(json.dumps({"results": results, **about}, indent=2) + "\n")


if __name__ == "__main__":
    main()
