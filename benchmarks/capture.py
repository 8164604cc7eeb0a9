"""What taps cost: capture against plain prefill of the same batch, alternating in one process.

    python benchmarks/capture.py [--target smollm2] [--rows 16] [--tokens 192] [--repeats 7] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from specgraft.capture.forward import capture_batch, spread_taps
from specgraft.records import Conversation
from specgraft.targets.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    taps = spread_taps(target.num_layers, args.taps)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (args.rows, args.tokens), generator=generator)
    rows = [
        Conversation(str(i), "f", "en", "chat", "train", row, [True] * args.tokens, 0, 0.0, 1.0, 0, "length", "")
        for i, row in enumerate(ids.tolist())
    ]

    def plain() -> None:
        target.forward(ids.to(target.device), target.cache(args.rows, args.tokens))

    def timed(call: object) -> float:
        began = time.perf_counter()
        call()  # type: ignore[operator]
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    capture = lambda: capture_batch(target, rows, taps)  # noqa: E731
    timed(plain), timed(capture)
    runs = [{"plain_seconds": timed(plain), "capture_seconds": timed(capture)} for _ in range(args.repeats)]
    ratio = statistics.median(run["capture_seconds"] / run["plain_seconds"] for run in runs)
    result = {
        "capture_over_prefill": ratio,
        "plain_tokens_per_second": args.rows * args.tokens / statistics.median(run["plain_seconds"] for run in runs),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps({**result, "runs": runs, "settings": {**vars(args), "json": str(args.json)}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
