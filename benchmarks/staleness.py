"""SpecOPD with the target elsewhere: what drawing branches some steps early (`stream.staleness`) gains in time, and what it costs.

    python benchmarks/staleness.py RUN.toml [section.key=value ...] [--lags 0,1,2] [--repeats 3] [--skip 4] [--json PATH]

RUN.toml is a run whose prompts are answered already, with `stream.medium = "ray"` and `distill.slots = "branches"` (or a preset of
them). It is trained once per lag and repeat, in turn, in folders below RUN/staleness. Seconds are medians over the steps behind the
first `--skip`; `score` is what the trainer waited for the target's states.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from compared import borrowed, run
from specgraft.log import read_metrics
from specgraft.run import Session
from specgraft.run_file import read_arguments, validate

PARTS = ("seconds", "sample_seconds", "score_seconds", "learn_seconds", "stall_seconds")


def trained(base: Session, lag: int, repeat: int, skip: int) -> dict[str, Any]:
    data = base.config.model_dump(mode="json")
    data["stream"]["staleness"] = lag
    work = Session(validate(data, "benchmarks/staleness.py"))
    folder = base.run.root / "staleness" / f"{lag}-{repeat}"
    shutil.rmtree(folder, ignore_errors=True)
    work.run = borrowed(base, "staleness", folder.name)
    work.train()
    rows = read_metrics(work.run.metrics)
    steps = [row for row in rows if row["kind"] == "train"]
    late = steps[skip:]
    whole = sum(row["seconds"] + row["stall_seconds"] for row in late)
    return {
        "lag": lag, "repeat": repeat, **{name: statistics.median(row[name] for row in late) for name in PARTS},
        "slots_per_second": sum(row["slots"] for row in late) / whole, "steps_per_second": len(late) / whole,
        "staleness": statistics.mean(row["staleness"] for row in late), "losses": [row["loss"] for row in steps],
        "branch_accept_length": statistics.mean(row["branch_accept_length"] for row in steps[-10:]),
        "validated": [row["accept_length"] for row in rows if row["kind"] == "validate"][-1],
    }  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    base = Session(read_arguments(args.arguments))
    if base.config.distill.origin != "branches" or base.config.stream.medium != "ray":
        raise ValueError('staleness is of branches scored elsewhere: set distill.preset="specopd" and stream.medium="ray"')
    lags = [int(lag) for lag in args.lags.split(",")]
    found = [trained(base, lag, repeat, args.skip) for repeat in range(args.repeats) for lag in lags]
    print("| staleness | supervised slots/s | against 0 (range) | step | sample | waits for scores | learn | stall | branch accept length | held out |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    first = [each["slots_per_second"] for each in found if each["lag"] == lags[0]]
    for lag in lags:
        mine = [each for each in found if each["lag"] == lag]
        ratios = [each["slots_per_second"] / other for each, other in zip(mine, first, strict=True)]
        mid = {name: statistics.median(each[name] for each in mine) for name in (*PARTS, "slots_per_second", "branch_accept_length", "validated")}
        cells = [f"{mid['slots_per_second']:.0f}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        cells += [f"{mid[name] * 1000:.0f} ms" for name in PARTS]
        print(f"| {lag} | " + " | ".join([*cells, f"{mid['branch_accept_length']:.3f}", f"{mid['validated']:.3f}"]) + " |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--lags", default="0,1,2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--json", type=Path)
    run(parser, compare)


if __name__ == "__main__":
    main()
