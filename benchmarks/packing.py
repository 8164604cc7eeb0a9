"""What padding costs: training steps over the same conversations and anchors, one row each and packed, alternating.

    python benchmarks/packing.py RUN.toml [section.key=value ...] [--row-tokens 0,512,4096] [--steps 3] [--repeats 3] [--json PATH]

Features are those of the run file. 0 row tokens: one conversation a row. Batches are made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.drafters.shared import Shared
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.stream.shards import ShardReader
from specgraft.train.batch import step_batches
from specgraft.train.setup import mask_token, new_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--row-tokens", default="0,512,4096")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base = Session(load_config(args.config, args.overrides))
    config, part, target = base.config, base.config.train, base.target
    reader = ShardReader(base.run.features, "train", base.header)
    drafter = new_drafter(config, target, base.header["taps"], base.conversations()).train()
    shared = Shared.of(target, mask_token(config, target))
    options = config.distill.model_copy(update={"slot_sampling": False})  # the same slots in every layout

    def step(batch: Batch) -> tuple[float, float]:
        """Processor seconds of forward and backward, and the loss."""
        drafter.zero_grad()
        began = time.process_time()
        outcome = objective(drafter, shared, batch, options, getattr(torch, part.compute))
        outcome.loss.backward()
        return time.process_time() - began, float(outcome.loss.detach())

    sizes = [int(size) for size in args.row_tokens.split(",")]
    size = config.drafters.draft_tokens
    batches = {
        tokens: list(
            step_batches(reader, part.rows, part.anchors, size, part.max_length, config.run.seed, 0, args.steps, target.device, tokens)
        )
        for tokens in sizes
    }
    rows: dict[int, dict[str, Any]] = {}
    for tokens, mine in batches.items():
        step(mine[0])
        ids, keeps = [b.texts.input_ids for b in mine], [b.anchors.keep for b in mine]
        rows[tokens] = {
            "rows": sum(len(x) for x in ids) / len(mine), "tokens": sum(x.numel() for x in ids),
            "blocks": sum(x.numel() for x in keeps), "kept": sum(int(x.sum()) for x in keeps), "seconds": [],
        }  # fmt: skip
    for _ in range(args.repeats):
        for tokens, mine in batches.items():
            spent, losses = zip(*map(step, mine), strict=True)
            rows[tokens]["seconds"].append(sum(spent) / len(mine))
            rows[tokens]["loss"] = losses
    print("| row tokens | rows a step | tokens | blocks, kept | processor s a step | loss of the last step |\n|---|---|---|---|---|---|")
    for tokens, row in rows.items():
        seconds = f"{statistics.median(row['seconds']):.2f} ({min(row['seconds']):.2f} to {max(row['seconds']):.2f})"
        print(f"| {tokens or 'none'} | {row['rows']:.1f} | {row['tokens']} | {row['blocks']}, {row['kept']} | {seconds} | {row['loss'][-1]:.5f} |")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "config": config.model_dump(mode="json")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
