"""Hidden states from a server of the target against those of this process, layer by layer, and tokens per second.

    python benchmarks/served_states.py [--target smollm2] [--dtypes float32 bfloat16] [--rows 12] [--json PATH]
    python benchmarks/served_states.py --server http://127.0.0.1:8000 --states /dev/shm/states --dtypes bfloat16

Starts vLLM (`make engines ENGINES=vllm`) for each dtype, unless a server is named. Rows are the target's own chat prompts, 9 to 300
ids; three more hold 80, 90 and 80 ids: the second shares its first 64 with the first, the third is the first again (a cache of
prefixes would shorten them). An error is |served - here| / |here| of the states of one token at one layer. In half precision both are
compared with this process in float32 too: what the server adds cannot be told from the dtype's own error where both are as far off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from specgraft.capture.forward import capture_batch, resolve_taps
from specgraft.capture.served import ServedStates
from specgraft.capture.stage import feature_header
from specgraft.check.tap_identity import tap_identity
from specgraft.config import RunConfig
from specgraft.engines.process import free_port
from specgraft.engines.serve import Serving, decoder_layers
from specgraft.records import Conversation, Features
from specgraft.targets.load import load_target
from specgraft.targets.text import load_text, resolve

LONGEST, SHORTEST = 300, 9


def rows_of(name: str, number: int) -> list[Conversation]:
    """`number` rows of rising length, then the three that share a prefix."""
    from specgraft.regen.mix import chosen_prompts
    from specgraft.regen.render import Chat

    text = load_text(name)
    chat = Chat(text.tokenizer, text.end_ids, "template")
    prompts = [prompt for split in chosen_prompts(RunConfig()).values() for prompt in split]
    stream = [token for prompt in prompts[:400] for token in chat.prompt(prompt.messages, prompt.tools)]
    lengths = [round(SHORTEST + place * (LONGEST - SHORTEST) / max(number - 1, 1)) for place in range(number)]
    found, start = [], 0
    for length in [*lengths, 80, 26]:
        found.append(stream[start : start + length])
        start += length
    first, rest = found[-2:]
    ids = [*found[:-2], first, first[:64] + rest, first]
    return [Conversation(f"row{n}", "f", "en", "chat", "train", row, [False] + [True] * (len(row) - 1), 1, 0.0, 1.0, 0, "length", "") for n, row in enumerate(ids)]


@contextmanager
def server_of(args: argparse.Namespace, dtype: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """URL of a server, and the folder where it leaves states."""
    if args.server:
        yield args.server, Path(args.states)
        return
    model = Path(resolve(args.target))
    taps = resolve_taps("spread", 5, decoder_layers(model))
    serving = Serving("vllm", model, free_port(), dtype=dtype, context=512, parallel=8, threads=args.threads, taps=taps, states=str(folder / "states"))
    began = time.monotonic()
    with serving.process(folder / f"{dtype}.log", limit=1800) as server:
        print(f"{dtype}: server ready after {time.monotonic() - began:.0f} s", flush=True)
        yield server.url, folder / "states"


def compared(served: Sequence[Features], here: Sequence[Features], taps: Sequence[int], layers: int) -> list[dict[str, Any]]:
    """One line a layer: the worst token over all rows."""
    lines = []
    for place, layer in enumerate([*taps, layers - 1]):
        pairs = [(a.last, b.last) if place == len(taps) else (a.taps[:, place], b.taps[:, place]) for a, b in zip(served, here, strict=True)]
        left, right = (torch.cat([pair[side] for pair in pairs]).double() for side in (0, 1))
        error = (left - right).norm(dim=-1) / right.norm(dim=-1)
        cosine = cosine_similarity(left, right, dim=-1)
        lines.append({"layer": layer, "largest_error": float(error.max()), "median_error": float(error.median()), "lowest_cosine": float(cosine.min())})
    return lines


def measure(args: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    target = load_target(args.target, dtype, "cpu")
    rows = rows_of(args.target, args.rows)
    part = {"servers": ["http://127.0.0.1:1"], "timeout": 600.0}
    config = RunConfig.model_validate({"target": {"id": args.target, "dtype": dtype}, "capture": part})
    header = feature_header(config, target)
    with server_of(args, dtype, folder) as (url, states):
        capture = config.capture.model_copy(update={"servers": [url], "states": str(states)})
        producer = ServedStates(capture, header, target.num_layers)
        next(producer.states(rows[:1]))  # warm
        began = time.perf_counter()
        served = list(producer.states(rows[:-1]))
        seconds = time.perf_counter() - began
        served += producer.states(rows[-1:])  # the first of the three again, when all is over
        gate = tap_identity(target, lambda c: next(producer.states([c])), [rows[0], rows[-2], rows[-4]], header["taps"])
        left = [path.name for path in Path(states).iterdir()]
    began = time.perf_counter()
    here = [capture_batch(target, [row], header["taps"])[0] for row in rows]
    tokens = sum(len(row.input_ids) for row in rows[:-1])
    own = tokens / (time.perf_counter() - began)
    lines = compared(served, here, header["taps"], target.num_layers)
    shared = [len(features.last) for features in served[-3:]]
    again = bool(torch.equal(served[-1].taps, served[-3].taps) and torch.equal(served[-1].last, served[-3].last))
    exact = []
    if dtype != "float32":
        wide = load_target(args.target, "float32", "cpu")
        truth = [capture_batch(wide, [row], header["taps"])[0] for row in rows]
        exact = [compared(who, truth, header["taps"], target.num_layers) for who in (served, here)]
    return {
        "dtype": dtype, "rows": len(rows), "tokens": tokens + len(rows[-1].input_ids), "layers": lines, "served_and_here_against_float32": exact, "shared_prefix_states": shared, "again_equal_bits": again,
        "gate": dataclasses.asdict(gate), "files_left": left, "tokens_per_second": tokens / seconds, "tokens_per_second_here": own,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", default="")
    parser.add_argument("--states", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(max(args.threads, 1))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            found.append(row := measure(args, dtype, Path(folder)))
            print(f"{dtype}: {row['rows']} rows, {row['tokens']} ids; states of the rows that share 64 ids: {row['shared_prefix_states']}")
            for line in row["layers"]:
                print("  layer {layer:2d}: largest error {largest_error:.2e}, median {median_error:.2e}, lowest cosine {lowest_cosine:.6f}".format(**line))
            for who, lines in zip(("served", "here"), row["served_and_here_against_float32"], strict=False):
                for line in lines:
                    print(f"  {who} against float32, layer {line['layer']:2d}: largest error {line['largest_error']:.2e}, median {line['median_error']:.2e}")
            print(f"  the same row again: {'same bits' if row['again_equal_bits'] else 'other bits'}; files left: {len(row['files_left'])}")
            print(f"  gate tap identity: {'passed' if row['gate']['passed'] else 'FAILED'}, {row['gate']['detail']}")
            print(f"  {row['tokens_per_second']:.0f} tokens/s served, {row['tokens_per_second_here']:.0f} in process, one row at a time", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
