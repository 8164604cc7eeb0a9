"""One training step, forward and backward, of ours against the released packages on this CPU: time, memory, growth.

    python benchmarks/train_step.py [--json PATH] [--quick] [--shape tiny|large|both] [--only dspark|dflash]
                                    [--precision fp32|bf16|both] [--peers speculators,specforge,automodel|none]
                                    [--repeats 3] [--threads 2]

Every contender is a process of its own, in its own environment (`peers/environments.py`), kept alive while its row is
measured: same random features, same starting values, anchors drawn by its own code. Contenders take turns, in the other
order every second repeat. Compared are processor seconds under OMP_WAIT_POLICY=PASSIVE, as wall time on a busy machine
says little; what exactly is measured stands in `peers/step.py`. The six headline ratios are DSpark's at the larger shape
in float32, medians; speed per supervised slot, as packages differ by a few slots at the end of a text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.environments import PEERS, interpreter

OURS, EAGER, NAIVE = "specgraft", "specgraft eager", "naive"
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128, "taps": 3,
        "context": 64, "anchors": 8, "draft_tokens": 7, "vocab": 1024, "markov_rank": 16,
    },
    "large": {
        "hidden": 576, "layers": 5, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536, "taps": 5,
        "context": 512, "anchors": 64, "draft_tokens": 7, "vocab": 49152, "markov_rank": 256,
    },
}  # fmt: skip
ANCHORS, VOCABULARIES = (16, 64, 256), (8192, 49152, 151936)


@dataclass(frozen=True)
class Contender:
    name: str
    python: str
    script: Path
    mode: str = ""


@dataclass
class Row:
    """One contender at one task. Filled by `measure`; `steps` raw, `failed` why there are none."""

    task: dict[str, Any]
    contender: str
    ready: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    failed: str = ""

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps)

    @property
    def rate(self) -> float:
        """Supervised slots per processor second."""
        return statistics.median(step["supervised"] / step["processor_s"] for step in self.steps)

    def report(self) -> dict[str, Any]:
        out: dict[str, Any] = {"contender": self.contender, "task": self.task, **self.ready, "steps": self.steps}
        if self.failed:
            return {**out, "not_measured": self.failed}
        medians = {name: self.median(name) for name in self.steps[0]}
        return {**out, **medians, "supervised_per_processor_s": self.rate}


class Worker:
    """A contender's process: says when it is ready, then answers one line for every step asked for."""

    def __init__(self, contender: Contender, task: dict[str, Any]) -> None:
        self.row = Row({**task, "mode": contender.mode}, contender.name)
        self.errors = tempfile.TemporaryFile("w+")
        command = [contender.python, str(contender.script), json.dumps(self.row.task)]
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(task["threads"])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=env
        )
        self.row.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        self.row.failed = said[-1] if said else f"ended with code {self.process.returncode}"
        return {}

    def step(self) -> None:
        if self.row.failed:
            return
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        if step := self.answer():
            self.row.steps.append(step)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def measure(contenders: list[Contender], task: dict[str, Any], repeats: int) -> list[Row]:
    """One row a contender; they alternate, the order turned round every second repeat."""
    workers = [Worker(contender, task) for contender in contenders]
    try:
        for repeat in range(repeats):
            for worker in workers if repeat % 2 == 0 else workers[::-1]:
                worker.step()
    finally:
        for worker in workers:
            worker.close()
    for worker in workers:
        show(worker.row)
    return [worker.row for worker in workers]


def show(row: Row) -> None:
    task = row.task
    shape = f"{task['anchors']} anchors, V {task['vocab']}"
    start = f"{task['drafter']:7} {shape:24} {task['precision']:5} {row.contender:12}"
    if row.failed:
        print(f"{start} not measured: {row.failed}", flush=True)
        return
    numbers = f"{row.median('processor_s'):9.3f} {row.median('wall_s'):8.3f} {row.median('peak_mib'):9.1f} {row.rate:11.1f}"
    print(f"{start} {numbers}", flush=True)


def ratios(rows: list[Row]) -> dict[str, float | None]:
    """Ours over each peer: speed per supervised slot (larger is better), peak memory (smaller is better)."""
    by_name = {row.contender: row for row in rows if row.steps}
    ours, out = by_name.get(OURS), {}
    for name in PEERS:
        peer = by_name.get(name)
        both = ours is not None and peer is not None
        out[f"speed_vs_{name}"] = ours.rate / peer.rate if both else None  # type: ignore[union-attr]
        out[f"memory_vs_{name}"] = ours.median("peak_mib") / peer.median("peak_mib") if both else None  # type: ignore[union-attr]
    for kind, worst in (("speed", min), ("memory", max)):
        found = [value for key, value in out.items() if key.startswith(kind) and value is not None]
        out[f"{kind}_vs_best"] = worst(found) if found else None
    return out


def slope(rows: dict[int, Row]) -> float | None:
    """MiB per anchor between the smallest and the largest count."""
    measured = sorted(size for size, row in rows.items() if row.steps)
    if len(measured) < 2:
        return None
    low, high = measured[0], measured[-1]
    return (rows[high].median("peak_mib") - rows[low].median("peak_mib")) / (high - low)


def growth(
    contenders: list[Contender], task: dict[str, Any], key: str, sizes: tuple[int, ...], known: list[Row]
) -> dict[str, Any]:
    """Time and peak of every contender while one number of the task grows; one step each, `known` rows are not repeated."""
    found: dict[str, dict[int, Row]] = {contender.name: {} for contender in contenders}
    for size in sizes:
        for row in known if size == task[key] else measure(contenders, {**task, key: size}, 1):
            if row.contender in found:
                found[row.contender][size] = row
    table: dict[str, Any] = {
        name: {str(size): row.report() for size, row in rows.items()} | {"mib_per_" + key: slope(rows)} for name, rows in found.items()
    }
    ours, naive = slope(found[OURS]), slope(found[NAIVE])
    table["slope_over_naive"] = ours / naive if ours is not None and naive else None
    return table


def peers_of(names: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """The peers that can run here, and why the others cannot."""
    found, missing = [], {}
    for name in names:
        try:
            found.append(Contender(name, str(interpreter(PEERS[name])), PEERS[name].script))
        except RuntimeError as error:
            missing[name] = str(error)
            print(f"{name}: not measured: {error}", flush=True)
    return found, missing


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one repeat, no peers in the growth tables")
    parser.add_argument("--shape", choices=("tiny", "large", "both"), default="both")
    parser.add_argument("--only", choices=("dspark", "dflash"))
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--peers", default=",".join(PEERS), help="names with commas, or none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    args.names = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(args.names) - set(PEERS):
        parser.error(f"--peers: known are {', '.join(PEERS)} and none, not {', '.join(sorted(unknown))}")
    if args.quick:
        args.repeats = 1
    return args


class Run:
    """What was asked for, who takes part, and what has been found so far; the JSON is written after every row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        script = Path(__file__).parent / "peers" / "specgraft_step.py"
        self.ours, self.naive = Contender(OURS, sys.executable, script), Contender(NAIVE, sys.executable, script, "naive")
        self.eager = Contender(EAGER, sys.executable, script, "eager")
        self.peers, missing = peers_of(args.names)
        self.drafters = [args.only] if args.only else ["dspark", "dflash"]
        self.precisions = ["fp32", "bf16"] if args.precision == "both" else [args.precision]
        self.shapes = ["tiny", "large"] if args.shape == "both" else [args.shape]
        empty = {f"{kind}_vs_{name}": None for kind in ("speed", "memory") for name in (*PEERS, "best")}
        self.result: dict[str, Any] = {**empty, "settings": {**vars(args), "json": str(args.json)}, "not_measured": missing, "rows": []}

    def task(self, shape: str, drafter: str, precision: str) -> dict[str, Any]:
        return {**SHAPES[shape], "drafter": drafter, "precision": precision, "threads": self.args.threads}

    def save(self) -> None:
        if self.args.json:
            self.args.json.write_text(json.dumps(self.result, indent=2) + "\n")

    def compare(self, shape: str, drafter: str, precision: str) -> list[Row]:
        """All contenders at one task; our naive losses too where the growth tables read them."""
        naive = [self.naive] if (drafter, precision) == ("dspark", "fp32") else []
        rows = measure([self.ours, *self.peers, self.eager, *naive], self.task(shape, drafter, precision), self.args.repeats)
        found = ratios(rows)
        self.result.setdefault(shape, {}).setdefault(drafter, {})[precision] = found
        if (shape, drafter, precision) == ("large", "dspark", "fp32"):
            self.result |= found
        self.result["rows"] += [{"shape": shape, **row.report()} for row in rows]
        self.save()
        return rows

    def same_losses(self, drafter: str) -> None:
        """Loss of every contender where each draws every legal anchor: equal values mean the same mathematics."""
        task = self.task("tiny", drafter, "fp32")
        rows = measure([self.ours, *self.peers], {**task, "anchors": task["context"] - 1}, 1)
        losses = {row.contender: row.median("loss") if row.steps else None for row in rows}
        self.result.setdefault("loss_of_all_anchors", {})[drafter] = losses

    def grow(self, known: list[Row]) -> None:
        task, both = self.task("large", "dspark", "fp32"), [self.ours, self.naive]
        self.result["anchors"] = growth(both if self.args.quick else [*both, *self.peers], task, "anchors", ANCHORS, known)
        self.save()
        self.result["vocab"] = growth(both, task, "vocab", VOCABULARIES, known)
        self.save()


def main() -> None:
    run = Run(settings())
    print(f"{'what':7} {'shape':24} {'prec.':5} {'contender':12} {'proc. s':>9} {'wall s':>8} {'peak MiB':>9} {'slots/proc s':>11}")
    known: list[Row] = []
    for shape in run.shapes:
        for drafter in run.drafters:
            if shape == "tiny" and run.peers:
                run.same_losses(drafter)
            for precision in run.precisions:
                rows = run.compare(shape, drafter, precision)
                if (shape, drafter, precision) == ("large", "dspark", "fp32"):
                    known = rows
    if known:
        run.grow(known)
    report(run.result)


def report(result: dict[str, Any]) -> None:
    for shape in ("tiny", "large"):
        for drafter, table in result.get(shape, {}).items():
            for precision, found in table.items():
                shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if value is not None)
                print(f"{shape} {drafter} {precision}: {shown or 'no peers'}")
    for key in ("anchors", "vocab"):
        table = result.get(key, {})
        for name, rows in table.items():
            if isinstance(rows, dict) and rows["mib_per_" + key] is not None:
                print(f"peak of {name} grows by {rows['mib_per_' + key]:.4f} MiB ({key} + 1)")
        if table:
            print(f"{key}: slope of ours over naive {table['slope_over_naive']:.3f}")


if __name__ == "__main__":
    main()
