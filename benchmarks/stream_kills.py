"""Random kill -9 of a producer, the trainer, or the Ray node process in a run with Ray producers; the end is the undisturbed run's.

    python benchmarks/stream_kills.py RUN.toml [section.key=value]... [--kills 20] [--within 2] [--seed 0] [--json PATH]

RUN.toml is a run whose prompts are answered already (`specgraft regen RUN.toml`), with `stream.medium = "ray"`. It is trained once
undisturbed, and once with kills at random times, the first `--within` seconds of the trainer's first step; a trainer that is gone, or stopped in one
line, is started again and goes on from its last checkpoint. Compared: final weights and optimiser, bit for bit, and that every
step stands in metrics.jsonl once with the loss of the undisturbed run. Only processes below the trainer that was started here are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specgraft.config import read_arguments
from specgraft.log import read_metrics
from specgraft.run_dir import RunDir
from specgraft.train.checkpoint import checkpoints


def below(pid: int) -> dict[int, str]:
    """Command lines of all processes below this one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = {}, [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            try:
                found[child] = (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    return found


def victim(trainer: int, kind: str) -> int | None:
    if kind == "trainer":
        return trainer
    names = {"producer": "ray::Host", "node": "raylet/raylet "}
    return next((pid for pid, line in below(trainer).items() if names[kind] in line), None)


def steps_done(run: RunDir) -> int:
    return max((row["step"] for row in read_metrics(run.metrics) if row["kind"] == "train"), default=0) if run.metrics.exists() else 0


class Attempt:
    """One process of `specgraft train`, and what it left running when it was killed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.handle = log.open("a")
        self.process = subprocess.Popen(command, stdout=self.handle, stderr=self.handle)

    def clean(self) -> None:
        """Ends what a killed trainer leaves: its Ray processes end by themselves, some after a while."""
        self.process.wait()
        self.handle.close()


def disturbed(command: list[str], run: RunDir, kinds: list[str], choose: random.Random, total: int, log: Path, within: float) -> dict[str, Any]:
    """Runs the command until the training is through, with kills of these kinds, in turn, at random times."""
    did: list[dict[str, Any]] = []
    starts, kills = 0, len(kinds)
    while True:
        attempt, began = Attempt(command, log), time.time()
        starts += 1
        end: float | None = None
        while attempt.process.poll() is None:
            if end is None and steps_done(run) and run.metrics.stat().st_mtime > began:  # it has begun its steps
                end = time.monotonic() + choose.uniform(0.0, within)
            if end is not None and time.monotonic() > end and len(did) < kills:
                kind = kinds[len(did)]
                pid = victim(attempt.process.pid, kind)
                if pid is not None:
                    children = below(attempt.process.pid)
                    killed = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    did.append({"kind": kind, "step": steps_done(run)})
                    if kind != "producer":
                        attempt.process.wait()
                        did[-1]["seconds_to_end"] = time.monotonic() - killed
                        for child in children:
                            if Path("/proc", str(child)).exists() and "ray" in below_line(child):
                                os.kill(child, signal.SIGKILL)
                end = time.monotonic() + choose.uniform(0.25, 1.5) * within
            time.sleep(0.02)
        attempt.clean()
        if attempt.process.returncode == 0 and steps_done(run) == total:
            return {"kills": did, "starts": starts}
        if starts > 4 * kills + 4:
            raise SystemExit(f"{starts} starts and no end; see {log}")


def below_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="*", default=[], help="what is killed, in turn; else drawn from producer, trainer, node")
    parser.add_argument("--whole-medium", default="ray", help="stream.medium of the undisturbed run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = read_arguments(args.arguments)
    source = RunDir(Path(config.run.root) / config.run.name)
    runs = {name: RunDir(source.root.with_name(f"{source.root.name}-{name}")) for name in ("whole", "killed")}
    found: dict[str, Any] = {}
    for name, run in runs.items():
        shutil.rmtree(run.root, ignore_errors=True)
        shutil.copytree(source.root, run.root, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
        command = [sys.executable, "-m", "specgraft.cli", "train", *args.arguments, f"run.name={run.root.name}"]
        began = time.monotonic()
        if name == "whole":
            command.append(f"stream.medium={args.whole_medium}")
        choose = random.Random(args.seed)
        kinds = [args.kinds[n % len(args.kinds)] if args.kinds else choose.choice(["producer", "trainer", "node"]) for n in range(args.kills)]
        found[name] = disturbed(command, run, kinds if name == "killed" else [], choose, config.train.steps, run.root / "train.log", args.within)
        found[name]["seconds"] = time.monotonic() - began
    rows = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(run.metrics) if row["kind"] == "train"] for run in runs.values()
    ]
    ends = [checkpoints(run.checkpoints)[-1] for run in runs.values()]
    same = all(
        left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
        for file in ("drafter.safetensors", "optimizer.safetensors")
        for left, right in [[load_file(end / file) for end in ends]]
    )
    slow = [kill["seconds_to_end"] for kill in found["killed"]["kills"] if "seconds_to_end" in kill]
    result = {
        "kills": dict(Counter(kill["kind"] for kill in found["killed"]["kills"])), "starts": found["killed"]["starts"],
        "longest_seconds_to_end": max(slow, default=0.0), "weights_and_optimiser_identical": same,
        "every_step_once_with_its_loss": rows[0] == rows[1] and [step for step, *_ in rows[1]] == list(range(1, config.train.steps + 1)),
        "seconds": {name: each["seconds"] for name, each in found.items()},
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps({**result, "each": found["killed"]["kills"]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
