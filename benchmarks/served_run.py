"""The same training on states of a server and of this process, beside what other last bits and another seed change.

    specgraft serve vllm smollm2 --taps 1,8,15,22,28 --port 8001 &
    python benchmarks/served_run.py RUN.toml [section.key=value ...] --servers http://127.0.0.1:8001 [--only served seed] [--json PATH]

RUN.toml is a run whose prompts are answered (`specgraft regen RUN.toml`), with `stream.medium = "memory"`. Runs lie in RUN/served/; one that is
through is not trained again. `here`: the target in this process, each row alone; `served`: states of the servers; `group 2`: two rows share a
pass, so some last bits are others, in the same order; `float32`: the same target without its dtype's rounding; `seed`: other weights to begin with,
another order and other anchors; `served alone`: one request at a time. A run in the target's own dtype passes the gates of capture first (the answers
are those of that dtype). A difference is that of one step's loss from `here`; at the first step the weights are the same, so only states differ.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from onpolicy import with_settings
from specgraft.capture.feed import opened
from specgraft.check.gates import recorded
from specgraft.config import RunConfig
from specgraft.log import read_metrics
from specgraft.records import Conversation
from specgraft.run import Session, prepare
from specgraft.run_file import load_config
from specgraft.train.checkpoint import checkpoints
from specgraft.train.stage import train


def variants(config: RunConfig, servers: list[str]) -> dict[str, dict[str, Any]]:
    """Settings of every run, by name; `here` first."""
    here: dict[str, Any] = {"capture.servers": []}
    there: dict[str, Any] = {"capture.servers": servers}
    return {
        "here": here,
        "served": there,
        "group 2": {**here, "stream.group": 2},
        "float32": {**here, "target.dtype": "float32"},
        "seed": {**here, "run.seed": config.run.seed + 1},
        "served alone": {**there, "capture.concurrency": 1},
    }


def trained(base: Session, conversations: list[Conversation], name: str, settings: dict[str, Any]) -> Session:
    """A session whose training with these settings is through."""
    where = {"run.root": str(base.run.root / "served"), "run.name": name.replace(" ", "-")}
    own = Session(with_settings(base.config, settings | where, name))
    same = own.config.target.dtype == base.config.target.dtype
    if same:
        own.__dict__["target"] = base.target  # loaded once
    if found := checkpoints(own.run.create().checkpoints):
        if found[-1].name == f"step-{own.config.train.steps:06d}":
            return own
    if same:
        own.passed(own.capture_gates(conversations))
    began = time.monotonic()
    train(own.config, own.run, own.target, own.header, conversations, opened=opened(own.config, own.run, own.target, own.header, conversations))
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return own


def told(own: Session, losses: list[float]) -> dict[str, Any]:
    """What a run's metrics say, against the `losses` of the run in this process."""
    rows = read_metrics(own.run.metrics)
    mine = [row["loss"] for row in rows if row["kind"] == "train"]
    apart = [abs(a - b) for a, b in zip(mine, losses or mine, strict=True)]
    last = [row for row in rows if row["kind"] == "validate"][-1]
    third = len(mine) // 3
    return {
        "losses": mine, "last_loss": fmean(mine[-third:]), "at_first": apart[0], "first_difference": fmean(apart[:third]), "last_difference": fmean(apart[-third:]),
        "largest_difference": max(apart), "accept_length": last["accept_length"], "alpha_accept_length": last["alpha_accept_length"],
        "held_out_tv": 1 - last["alpha_survival"][0], "gates": {gate["name"]: gate["detail"] for gate in recorded(own.run)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--only", nargs="+", default=[], help="runs by name, behind `here`; else all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base = Session(load_config(args.config, args.overrides))
    prepare(base.config)
    conversations = base.conversations()
    found: dict[str, dict[str, Any]] = {}
    for name, settings in variants(base.config, args.servers).items():
        if name == "here" or not args.only or name in args.only:
            losses = found["here"]["losses"] if found else []
            found[name] = told(trained(base, conversations, name, settings), losses)
    print("| run | loss, last third | difference of a step's loss: first step, first third, last third, largest | held out: accept length, expected, TV of slot 1 |")
    print("|---|---|---|---|")
    for name, row in found.items():
        print(
            "| {name} | {last_loss:.4f} | {at_first:.4f}, {first_difference:.4f}, {last_difference:.4f}, {largest_difference:.4f} | "
            "{accept_length:.4f}, {alpha_accept_length:.4f}, {held_out_tv:.4f} |".format(name=name, **row)
        )
    if args.json:
        args.json.write_text(json.dumps({"runs": found, "config": base.config.model_dump(mode="json")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
