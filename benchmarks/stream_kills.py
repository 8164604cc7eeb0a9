"""Random kill -9 of a producer, the trainer, one of its ranks, or the Ray node process; the end is the undisturbed run's.

    python benchmarks/stream_kills.py RUN.toml [section.key=value]... [--ranks 2] [--kills 20] [--within 2] [--seed 0] [--json PATH]

RUN.toml is a run whose prompts are answered already (`specgraft regen RUN.toml`), with `stream.medium = "ray"`. It is trained once
undisturbed, and once with kills at random times, the first `--within` seconds of the trainer's first step, every other one while a
checkpoint is written; a trainer that is gone, or stopped in one line, is started again and goes on from its last checkpoint. With
`--ranks` the trainer is torchrun, and its ranks share a cluster that is started here (loopback, a token of its own) and started again
when its node is killed. Compared: final weights and optimiser, bit for bit, and that every step stands in metrics.jsonl once with the
loss of the undisturbed run. Only processes that were started here are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specgraft.log import read_metrics
from specgraft.run_dir import RunDir
from specgraft.run_file import read_arguments
from specgraft.stream.cluster import ON_LOOPBACK
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


NAMES = {"producer": "ray::Host", "node": "raylet/raylet ", "rank": " train "}


def victim(trainer: int, cluster: int, kind: str, choose: random.Random) -> int | None:
    if kind == "trainer":
        return trainer
    found = below(trainer if kind == "rank" or not cluster else cluster)
    there = sorted(pid for pid, line in found.items() if NAMES[kind] in line and Path("/proc", str(pid), "exe").exists())
    return choose.choice(there) if there else None


def steps_done(run: RunDir) -> int:
    return max((row["step"] for row in read_metrics(run.metrics) if row["kind"] == "train"), default=0) if run.metrics.exists() else 0


def writing(run: RunDir) -> set[str]:
    """Checkpoints under way, and those that a killed process left half written."""
    return {path.name for path in run.checkpoints.glob(".step-*.tmp")}


class Cluster:
    """`ray start` on loopback for the ranks of a trainer; nothing where there is one process, which starts its own."""

    def __init__(self, ranks: int, cpus: float, folder: Path) -> None:
        self.ranks, self.cpus, self.folder = ranks, cpus, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {**os.environ, ON_LOOPBACK: "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)} if ranks > 1 else {}
        self.port = 0

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def up(self) -> None:
        """Starts it where it is down, or has lost its node."""
        if self.ranks == 1 or (self.process and self.process.poll() is None and any(NAMES["node"] in line for line in below(self.pid).values())):
            return
        self.down()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        own = Path(tempfile.mkdtemp(dir=self.folder))  # sockets lie there: a short path
        ray = Path(sys.executable).with_name("ray")
        command = f"{ray} start --head --block --node-ip-address 127.0.0.1 --include-dashboard false --port {self.port} --temp-dir {own}"
        with (self.folder / "log").open("a") as log:
            more = ["--num-cpus", str(max(1, round(self.cpus + 0.5))), "--num-gpus", "0", "--object-store-memory", str(128 * 2**20)]
            self.process = subprocess.Popen([*command.split(), *more], stdout=log, stderr=log, env=self.environment)
        end = time.monotonic() + 120
        while not any(NAMES["node"] in line for line in below(self.pid).values()) or not answers(self.port):
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"no Ray cluster came up; see {self.folder / 'log'}")
            time.sleep(0.2)

    def down(self) -> None:
        if self.process is None:
            return
        family = [*below(self.pid)]
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        end_all(family)
        self.process = None


def answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def end_all(pids: list[int]) -> None:
    """Those of Ray's processes, started below this one, that are there still: they end by themselves, some after a while."""
    for pid in pids:
        if "ray" in below_line(pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def clustered(ranks: int, cpus: float) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="kills", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(ranks, cpus, Path(folder))
        try:
            yield cluster
        finally:
            cluster.down()


def disturbed(
    command: list[str], cluster: Cluster, run: RunDir, kinds: list[str], choose: random.Random, total: int, log: Path, within: float
) -> dict[str, Any]:
    """Runs the command until the training is through, with kills of these kinds, in turn, at random times."""
    did: list[dict[str, Any]] = []
    starts, kills = 0, len(kinds)
    while True:
        if "stream.medium=memory" not in command:
            cluster.up()
        address = [f"stream.address=127.0.0.1:{cluster.port}"] if cluster.port else []
        with log.open("a") as handle:
            trainer = subprocess.Popen([*command, *address], stdout=handle, stderr=handle, env=cluster.environment)
        began, before, family = time.time(), steps_done(run), dict[int, str]()
        stale = writing(run)
        starts += 1
        end: float | None = None
        while trainer.poll() is None:
            done = steps_done(run)
            if done < before:  # rows past its checkpoint are dropped
                before = done
            if end is None and done > before and run.metrics.stat().st_mtime > began:  # it has made a step of its own
                end = time.monotonic() + choose.uniform(0.0, within)
            in_write = len(did) % 2 == 1
            if end is not None and time.monotonic() > end and len(did) < kills and (writing(run) - stale or not in_write):
                kind = kinds[len(did)]
                pid = victim(trainer.pid, cluster.pid, kind, choose)
                if pid is not None:
                    family = below(trainer.pid)
                    killed = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    did.append({"kind": kind, "step": steps_done(run), "in_write": in_write})
                    if kind != "producer":
                        trainer.wait()
                        did[-1]["seconds_to_end"] = time.monotonic() - killed
                        did[-1]["orphans"] = outlived([child for child, line in family.items() if NAMES["rank"] in line])
                        did[-1]["producers_left"] = outlived([child for child, line in below(cluster.pid).items() if NAMES["producer"] in line]) if cluster.pid else 0
                        end_all(list(family))
                end = time.monotonic() + choose.uniform(0.25, 1.5) * within
            time.sleep(0.002 if in_write and end is not None and len(did) < kills else 0.02)
        if trainer.returncode == 0 and steps_done(run) == total:
            return {"kills": did, "starts": starts}
        if starts > 4 * kills + 4:
            raise SystemExit(f"{starts} starts and no end; see {log}")


def outlived(pids: list[int], patience: float = 10.0) -> int:
    """How many of these processes are there still when that time has passed."""
    end = time.monotonic() + patience
    while (left := sum(bool(below_line(pid)) for pid in pids)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def below_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--ranks", type=int, default=1, help="more than one: torchrun, and a cluster by address")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="*", default=[], help="what is killed, in turn; else drawn from producer, trainer, node, and rank where there are some")
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
        python, torchrun = [sys.executable, "-m"], ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m"]
        command = [*python, *(torchrun if args.ranks > 1 else []), "specgraft", "train", *args.arguments, f"run.name={run.root.name}"]
        began = time.monotonic()
        if name == "whole":
            command.append(f"stream.medium={args.whole_medium}")
        choose = random.Random(args.seed)
        every = ["producer", "trainer", "node", *(["rank"] if args.ranks > 1 else [])]
        kinds = [args.kinds[n % len(args.kinds)] if args.kinds else choose.choice(every) for n in range(args.kills)]
        with clustered(args.ranks, config.stream.producers * config.stream.cpus) as cluster:
            found[name] = disturbed(
                command, cluster, run, kinds if name == "killed" else [], choose, config.train.steps, run.root / "train.log", args.within
            )
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
    each = found["killed"]["kills"]
    slow = [kill["seconds_to_end"] for kill in each if "seconds_to_end" in kill]
    result = {
        "ranks": args.ranks, "kills": dict(Counter(kill["kind"] for kill in each)), "in_writes": sum(kill["in_write"] for kill in each), "starts": found["killed"]["starts"],
        "orphans": sum(kill.get("orphans", 0) for kill in each), "producers_left": sum(kill.get("producers_left", 0) for kill in each),
        "longest_seconds_to_end": max(slow, default=0.0), "weights_and_optimiser_identical": same,
        "every_step_once_with_its_loss": rows[0] == rows[1] and [step for step, *_ in rows[1]] == list(range(1, config.train.steps + 1)),
        "seconds": {name: each["seconds"] for name, each in found.items()},
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps({**result, "each": each}, indent=2) + "\n")


if __name__ == "__main__":
    main()
