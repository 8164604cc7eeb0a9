"""Ray producers with set speeds in front of trainers with set speeds: every sample once, the trainer's stall, bytes in the queue.

    python benchmarks/stream.py [--samples 2000] [--ranks 2] [--step-seconds 0.2] [--factor 2] [--bound-mb 8] [--group 8] [--json PATH]

Two producers sleep in place of a forward pass, one twice as long as the other; together they make `--factor` times as many rows a
second as the trainer ranks take. Each rank is a process with its own order (its part of a permutation), asks through the crew of
`stream.crew`, and sleeps `--step-seconds` for each step of 8 rows. Transport, leases and the object store are the real ones.
The cluster is started here: loopback, 2 CPUs, no dashboard.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specgraft.config import StreamSection
from specgraft.records import Conversation, Features, ids_digest
from specgraft.stream.cluster import connect, ray
from specgraft.stream.crew import Crew
from specgraft.stream.live import Counts, LiveSource
from specgraft.stream.memory import MemoryStream
from specgraft.stream.parcels import Failed, Parcel, parcel

ROWS, TOKENS, TAPS, HIDDEN = 8, 64, 5, 64  # a step; a row
HEADER: dict[str, Any] = {"target": {"weights": "none", "dtype": "bfloat16"}, "dtype": "bfloat16"}
ROW_BYTES = TOKENS * (TAPS + 1) * HIDDEN * 2


class Sleeper:
    """What a producer of this benchmark holds: the second one is half as fast."""

    def __init__(self, seconds: float) -> None:
        name = ray().get_runtime_context().get_actor_name() or ""
        self.seconds = seconds * (2 if "producer-1" in name else 1)


def sleep_and_make(held: Sleeper, rows: list[Conversation]) -> list[Parcel | Failed]:
    time.sleep(held.seconds * len(rows))
    return [parcel(features(row), False, lambda found: None) for row in rows]


def features(row: Conversation) -> Features:
    ids = torch.tensor(row.input_ids)
    last = ids[:, None].expand(-1, HIDDEN).to(torch.bfloat16)
    return Features(row.prompt_id, ids, torch.tensor(row.loss_mask), last[:, None].expand(-1, TAPS, -1).contiguous(), last.contiguous())


def texts(count: int) -> list[Conversation]:
    found = []
    for number in range(count):
        ids = [(number + place) % 1000 for place in range(TOKENS)]
        found.append(
            Conversation(f"p{number}", "f", "en", "chat", "train", ids, [True] * TOKENS, 0, 0.0, 1.0, 0, "length", ids_digest(ids))
        )
    return found


def section(args: argparse.Namespace, address: str = "") -> StreamSection:
    return StreamSection(
        medium="ray", producers=2, cpus=0.5, bound_mb=args.bound_mb, address=address, group=args.group, start_timeout=600
    )


def rank(args: argparse.Namespace) -> dict[str, Any]:
    """One trainer rank: what it consumed, and how long it waited."""
    torch.set_num_threads(1)
    number, rows = int(os.environ["RANK"]), texts(args.samples)
    order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(0)).tolist()[number :: args.ranks]
    # rows a second of both producers: 1/s + 1/(2 s); of all ranks: ROWS / step
    seconds = 1.5 / (args.factor * args.ranks * ROWS / args.step_seconds)
    counts = Counts()
    with Crew(section(args, args.address), partial(Sleeper, seconds)) as crew:
        for member in crew.members:
            member.current()
        make = crew.make(sleep_and_make, lambda row: ROW_BYTES, counts)
        source = LiveSource(rows, {row.prompt_id: row.digest for row in rows}, HEADER, make, counts, args.group)

        def steps() -> Iterator[list[str]]:
            step: list[str] = []
            for row in source.rows(order):
                assert row is not None and torch.equal(row.input_ids.to(torch.bfloat16), row.last[:, 0])
                step.append(row.prompt_id)
                if len(step) == ROWS:
                    yield step
                    step = []
            if step:
                yield step

        consumed: list[str] = []
        stalls: list[float] = []
        with MemoryStream(steps(), bound=2) as stream:
            ahead = iter(stream)
            began = waiting = time.monotonic()
            while (step := next(ahead, None)) is not None:
                stalls.append(time.monotonic() - waiting)
                time.sleep(args.step_seconds)
                consumed += step
                waiting = time.monotonic()
            total = waiting - began
        facts = source.facts()
        (Path(args.folder) / f"done-{number}").touch()
        while number == 0 and len(list(Path(args.folder).glob("done-*"))) < args.ranks:
            time.sleep(0.05)  # its end is the producers' end
    return {
        "consumed": consumed, "seconds": total, "stall_share": sum(stalls) / total, "stall_share_without_first": sum(stalls[1:]) / (total - stalls[0]),
        "first_wait_seconds": stalls[0], "queue_peak_bytes": facts["queue_peak_bytes"], "producer_share": facts["producer_share"],
    }  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    assert connect(section(args))
    address = ray().get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, __file__, "--address", address, "--folder", folder]
        for name in ("samples", "ranks", "step_seconds", "factor", "bound_mb", "group"):
            base += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        ranks = [
            subprocess.Popen(base, stdout=subprocess.PIPE, text=True, env={**os.environ, "RANK": str(n), "WORLD_SIZE": str(args.ranks), "MASTER_PORT": "1"})
            for n in range(args.ranks)
        ]
        try:
            told = [process.communicate()[0] for process in ranks]
            if any(process.returncode for process in ranks):
                raise SystemExit("a rank failed")
        finally:
            for process in ranks:
                process.kill()
            ray().shutdown()
    found = [json.loads(text.splitlines()[-1]) for text in told]
    times = Counter(name for each in found for name in each.pop("consumed"))
    bound = int(args.bound_mb * 1e6)
    return {
        "samples": args.samples, "ranks": args.ranks, "factor": args.factor, "group": args.group, "step_seconds": args.step_seconds,
        "each_once": len(times) == args.samples and set(times.values()) == {1}, "bound_bytes": bound,
        "inside_bound": all(each["queue_peak_bytes"] <= bound for each in found), "by_rank": found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--factor", type=float, default=2.0, help="rows a second of the producers over those of the trainers")
    parser.add_argument("--bound-mb", type=float, default=8.0)
    parser.add_argument("--group", type=int, default=8, help="rows of a lease")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.address:
        print(json.dumps(rank(args)))
        return
    found = run(args)
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
