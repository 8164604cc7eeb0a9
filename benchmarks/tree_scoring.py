"""What it costs to score a proposal tree: against one plain forward over as many tokens, and against running every branch alone.

    python benchmarks/tree_scoring.py [TARGET ...] [--anchors 32] [--width 7] [--stem 512] [--repeats 5] [--json PATH]

TARGET is `smollm2` or a Hugging Face folder. Each figure is a median of ratios within a repeat, in which all variants take
turns. `ideal_ratio` and `reexec_ratio` compare with the faster of Hugging Face's forward (its own attention and linear layers,
no cache, no logits) and our own. Time is CPU seconds of one thread (`--clock wall`: seconds, all threads), so that other work
on the machine is not counted. Legend: S stem tokens, N branches, W tokens a branch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from specgraft.targets.load import load_target
from specgraft.targets.scoring import prefill, score, score_packed
from tree_case import Case, draw, error_fp64

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
Call = Callable[[], Any]


def seconds(call: Call, clock: Callable[[], float], device: torch.device) -> float:
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def alternate(calls: dict[str, Call], repeats: int, clock: Callable[[], float], device: torch.device) -> list[dict[str, float]]:
    """Seconds of every call in every repeat; the order turns."""
    names = list(calls)
    runs = []
    for repeat in range(repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        runs.append({name: seconds(calls[name], clock, device) for name in order})
    return runs


def over(runs: list[dict[str, float]], name: str, other: str) -> dict[str, float]:
    found = [run[name] / run[other] for run in runs]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def peak_mib(call: Call, device: torch.device) -> float:
    """Most memory that tensors made by `call` held at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        began = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - began) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        call()
    held = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20


def growth(case: Case, counts: list[int], repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of the node pass behind a stem that is there, and of the whole, by number of branches; how straight the line is."""
    device, width, calls = case.target.device, case.tree.branches.shape[1], dict[str, Call]()
    stem = prefill(case.target, case.ids)
    for count in counts:
        tree = draw(case.target, len(case.ids), count, width)[1]
        calls[f"nodes {count}"] = lambda tree=tree: score(case.target, stem, tree)
        calls[f"whole {count}"] = lambda tree=tree: score_packed(case.target, case.ids, tree)
    runs = alternate(calls, repeats, clock, device)
    table = {}
    for name in ("nodes", "whole"):
        times = numpy.array([statistics.median(run[f"{name} {count}"] for run in runs) for count in counts])
        slope, start = numpy.polyfit(counts, times, 1)
        fit = slope * numpy.array(counts) + start
        table[name] = {"seconds": times.tolist(), "deviation": float(abs(times / fit - 1).max()), "slope": float(slope)}
    return {"anchors": counts, **table}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    target = load_target(name, args.dtype, args.device)
    plain: Any = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype, attn_implementation="sdpa")
    plain = plain.to(target.device).eval().requires_grad_(False)
    case = Case(target, plain, *draw(target, args.stem, args.anchors, args.width))
    clock, device = CLOCKS[args.clock], target.device
    stem, whole = prefill(target, case.ids), case.whole()
    once = {
        "score": case.score,
        "two_phase": lambda: score(target, prefill(target, case.ids), case.tree),
        "nodes": lambda: score(target, stem, case.tree),
        "theirs": lambda: case.theirs(whole[None]),
        "ours": lambda: case.ours(whole),
    }
    for call in once.values():
        call()  # the first of each is not timed
    runs = alternate(once, args.repeats, clock, device)
    again = alternate(
        {
            "score": case.score,
            "theirs": lambda: case.one_by_one(lambda text: case.theirs(text[None])),
            "ours": lambda: case.one_by_one(case.ours),
            "batched": case.batched,
        },
        args.reexec_repeats,
        clock,
        device,
    )
    ratios = {
        "over_theirs": over(runs, "score", "theirs"),
        "over_ours": over(runs, "score", "ours"),
        "two_phase_over_theirs": over(runs, "two_phase", "theirs"),
        **{f"reexec_{who}": over(again, who, "score") for who in ("theirs", "ours", "batched")},
    }
    times = [run["score"] for run in runs]
    return {
        "target": name,
        "kind": target.config.model_type,
        "ideal_ratio": max(ratios[key]["median"] for key in ("over_theirs", "over_ours")),
        "reexec_ratio": min(ratios[key]["median"] for key in ("reexec_theirs", "reexec_ours")),
        "error_fp64": error_fp64(case, min(args.stem, args.error_stem), min(args.anchors, 8), args.width),
        "peak_mib": peak_mib(case.score, device),
        "peak_mib_plain": peak_mib(lambda: case.theirs(whole[None]), device),
        "seconds": {key: statistics.median(run[key] for run in runs) for key in runs[0]},
        "noise": (max(times) - min(times)) / statistics.median(times),
        "ratios": ratios,
        "growth": growth(case, args.growth, args.repeats, clock),
        "runs": runs,
        "reexec_runs": again,
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['target']} ({row['kind']})")
    print(f"  ideal_ratio {row['ideal_ratio']:.3f}   reexec_ratio {row['reexec_ratio']:.1f}   error_fp64 {row['error_fp64']:.1e}")
    print(f"  peak of one score {row['peak_mib']:.1f} MiB, of a plain forward {row['peak_mib_plain']:.1f} MiB")
    print("  seconds: " + ", ".join(f"{key} {value:.3f}" for key, value in row["seconds"].items()))
    for key, found in row["ratios"].items():
        print(f"  {key:22} {found['median']:7.3f}  ({found['least']:.3f} to {found['most']:.3f})")
    grown = row["growth"]
    for name in ("nodes", "whole"):
        cells = "  ".join(f"{n}: {s:.3f}" for n, s in zip(grown["anchors"], grown[name]["seconds"], strict=True))
        print(f"  growth of {name}, seconds by anchors  {cells}  (off the straight line by {grown[name]['deviation']:.1%} at most)")
    print(f"  noise: one score's times lie within {row['noise']:.1%} of each other", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["smollm2"])
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--width", type=int, default=7)
    parser.add_argument("--stem", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reexec-repeats", type=int, default=3)
    parser.add_argument("--growth", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="numbers of anchors")
    parser.add_argument("--error-stem", type=int, default=160, help="stem of the float64 comparison")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name in args.targets:
        rows.append(measure(name, args))
        show(rows[-1])
        if args.json:
            settings = {**vars(args), "json": str(args.json)}
            args.json.write_text(json.dumps({"results": rows, "settings": settings, "threads": torch.get_num_threads()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
