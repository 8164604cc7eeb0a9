"""What `train.compile` is worth on this CPU: DSpark's training step with and without compiled MLPs of the draft layers, in turns.

    python benchmarks/train_compile.py [--shape large] [--repeats 3] [--threads 2] [--json PATH]

Both compile the passes over logits (`distill.fused`), as long runs do. `ready` is the time until a process has made its first
step, so the difference is what compiling costs. Processor seconds, as in `train_step.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from train_step import SHAPES, Contender, Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    script, found = Path(__file__).parent / "peers" / "specgraft_step.py", []
    for precision in ("fp32", "bf16") if args.precision == "both" else (args.precision,):
        task = {**SHAPES[args.shape], "drafter": "dspark", "precision": precision, "threads": args.threads}
        workers = []
        for name, mode in (("plain", ""), ("compiled", "layers")):
            began = time.perf_counter()
            workers.append(Worker(Contender(name, sys.executable, script, mode), task))
            workers[-1].row.ready["ready_s"] = time.perf_counter() - began
        for repeat in range(args.repeats):
            for worker in workers if repeat % 2 == 0 else workers[::-1]:
                worker.step()
        for worker in workers:
            worker.close()
            row = worker.row
            found.append(row.report())
            said = row.failed or (
                f"ready {row.ready['ready_s']:.0f} s, step {row.median('processor_s'):.3f} processor s, {row.median('wall_s'):.3f} s, "
                f"peak {row.median('peak_mib'):.0f} MiB, loss {row.median('loss'):.6f}"
            )
            print(f"{precision} {row.contender:8} {said}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
