"""Where a round of our decoding goes, our plain decoding against Hugging Face `generate`, and what each measure saves.

    python benchmarks/decode.py RUN [--dtype bfloat16] [--parts split ar measures] [--json PATH]
    python benchmarks/decode.py TARGET --parts ar

RUN is the folder of a trained run (target, newest checkpoint, held-out prompts); with the id of a target alone there is no drafter and the
prompts are token ids drawn at random. CPU seconds of one thread, contenders alternating, medians: other work on the machine hardly
counts; with --threads N wall seconds of N threads, for a machine of one's own. Greedy, end tokens kept, the same prompts for all. Keys:
fixed_share: share of a speculative round outside the two models' forwards, batch 1.
ar_vs_hf_b1, ar_vs_hf_b16: tokens per second of `targets.generate` over those of `generate`, the faster of its dynamic and static caches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from specgraft.decode import loop
from specgraft.decode.loop import Request, Timing, decode
from specgraft.decode.pair import Pair, pair
from specgraft.drafters.precision import at_precision
from specgraft.drafters.store import load_drafter
from specgraft.records import read_conversations
from specgraft.run_dir import RunDir
from specgraft.targets import lean, static
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate
from specgraft.targets.load import load_target
from specgraft.targets.model import Target

clock: Callable[[], float] = time.process_time


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = clock()
    found = work()
    return clock() - began, found


def plain(target: Target, prompts: list[list[int]], batch: int, new: int) -> list[list[int]]:
    requests = [PlainRequest(ids, new) for ids in prompts]
    generate(target, requests, batch)
    return [request.output for request in requests]


@torch.inference_mode()
def hugging_face(model: Any, ends: tuple[int, ...], prompts: list[list[int]], batch: int, new: int, cache: str) -> list[list[int]]:
    """transformers' own, `batch` prompts of like length at a time, padded on the left."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    texts: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        width = max(len(prompts[number]) for number in some)
        ids, mask = torch.zeros(len(some), width, dtype=torch.long), torch.zeros(len(some), width, dtype=torch.long)
        for row, number in enumerate(some):
            ids[row, width - len(prompts[number]) :] = torch.tensor(prompts[number])
            mask[row, width - len(prompts[number]) :] = 1
        how = {} if cache == "dynamic" else {"cache_implementation": cache}
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=list(ends), pad_token_id=0, **how
        )
        for row, number in enumerate(some):
            text = out[row, width:].tolist()
            end = next((place + 1 for place, token in enumerate(text) if token in ends), new)
            texts[number] = text[:end]
    return texts


def against_hugging_face(target: Target, prompts: list[list[int]], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both. The same texts, but for ties of half precision and of padded rows: counted."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype, attn_implementation="sdpa").eval()
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "ours": lambda: plain(target, prompts, batch, args.new),
        "dynamic": lambda: hugging_face(model, target.end_ids, prompts, batch, args.new, "dynamic"),
        "static": lambda: hugging_face(model, target.end_ids, prompts, batch, args.new, "static"),
    }
    plain(target, prompts[:1], 1, 2)  # the lean pass is made here
    runs = []
    for repeat in range(args.repeats):
        names = list(ways)[repeat % 3 :] + list(ways)[: repeat % 3]
        run = {}
        for name in names:
            seconds, texts = timed(ways[name])
            run[name] = sum(map(len, texts)) / seconds
            if name != "static":
                run[f"texts_{name}"] = texts
        run["same"] = sum(a == b for a, b in zip(run.pop("texts_ours"), run.pop("texts_dynamic"), strict=True)) / len(prompts)
        runs.append(run)
    rate = {name: median(run[name] for run in runs) for name in ways}
    ratio = median(run["ours"] / max(run["dynamic"], run["static"]) for run in runs)
    return {"batch": batch, "prompts": len(prompts), "tokens_per_second": rate, "ratio": ratio, "same_texts": runs[-1]["same"]}


def drafted(both: Pair, prompts: list[list[int]], batch: int, new: int) -> tuple[list[Request], Timing]:
    requests, timing = [Request(ids, new) for ids in prompts], Timing()
    with patch.object(loop, "clock", clock):
        decode(both, requests, batch, timing=timing)
    return requests, timing


def split(both: Pair, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a round at batch 1, and how much of it lies outside the models: outside the target's pass and its head, and
    the drafter's block, walk and injected context."""
    inside = [0.0]
    depth = [0]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    inside[0] += clock() - began

        return run

    shares, rows = [], []
    drafted(both, prompts[:1], 1, 8)
    for _ in range(args.repeats):
        with ExitStack() as stack:
            for owner, name in ((both.target, "forward"), (both.target, "logits"), (both.drafter, "draft"), (both.drafter, "advance")):
                stack.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
            inside[0] = 0.0
            entering = Timing()
            total = 0.0
            for prompt in prompts:  # prefill is not part of a round: its models' seconds are taken out
                requests = [Request(prompt, args.new)]
                began_inside = inside[0]
                timing = Timing()
                prefill_inside = [0.0]
                enter = loop._Loop._enter

                def entered(self: Any, rows: list[int], enter: Any = enter, kept: list[float] = prefill_inside) -> None:
                    before = inside[0]
                    enter(self, rows)
                    kept[0] += inside[0] - before

                with patch.object(loop, "clock", clock), patch.object(loop._Loop, "_enter", entered):
                    seconds, _ = timed(lambda r=requests, t=timing: decode(both, r, 1, timing=t))
                total += seconds - timing.prefill
                inside[0] = began_inside + (inside[0] - began_inside - prefill_inside[0])
                for field in ("draft", "verify", "accept", "commit", "rest", "rounds"):
                    setattr(entering, field, getattr(entering, field) + getattr(timing, field))
        shares.append(1 - inside[0] / total)
        ms = 1000 / entering.rounds
        parts = {
            "draft": (entering.draft - entering.commit) * ms,
            "verify": entering.verify * ms,
            "accept": entering.accept * ms,
            "commit": entering.commit * ms,
        }
        rows.append({**parts, "rest": total * ms - sum(parts.values()), "step": total * ms})
    return {
        "fixed_share": median(shares),
        "ms": {name: median(row[name] for row in rows) for name in rows[0]},
        "fixed_shares": shares,
    }


def measures(target: Target, both: Pair | None, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each measure left out alone: seconds without over seconds with."""
    full = target.lean()
    if full is None:
        return []

    def bare(model: Any) -> lean.Lean:
        with patch.object(lean, "packs", lambda model: False):
            return lean.Lean(model)

    unpacked = bare(target.model)
    full = lean.Lean(target.model)  # again: the line above moved the parameters
    target._lean = full
    padded = patch.object(static.StaticCache, "divided", staticmethod(lambda rows, held, width: [(0, len(held))]))
    off: dict[str, tuple[str, Any]] = {
        "packed matrices": ("ar", patch.object(target, "_lean", unpacked)),
        "lean pass (and packed matrices)": ("ar", patch.object(target, "lean", lambda: None)),
        "rows read to their own length": ("ar", padded),
    }
    if both is not None:
        head = both.drafter.markov_head
        if both.bias is not None and head is not None and head.reads_token_only:
            off["bias rows of the Markov head remembered"] = ("decode", patch.object(type(both.bias), "__call__", lambda self, y, z: head.bias(z)))
        off["lean verify"] = ("decode", patch.object(target, "lean", lambda: None))
    found = []
    for name, (kind, without) in off.items():
        for batch in (1, 16):
            some = prompts[: max(2, batch)]

            def work(kind: str = kind, some: list[list[int]] = some, batch: int = batch) -> Any:
                if kind == "ar":
                    return plain(target, some, batch, args.new)
                assert both is not None
                return drafted(both, some, batch, args.new)

            ratios = []
            for _ in range(args.repeats):
                seconds, _ = timed(work)
                with without:
                    slower, _ = timed(work)
                ratios.append(slower / seconds)
            found.append({"measure": name, "of": kind, "batch": batch, "times": median(ratios)})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", nargs="+", default=["split", "ar", "measures"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.threads > 1:
        globals()["clock"] = time.perf_counter
    run = RunDir(Path(args.run)) if (Path(args.run) / "config.json").exists() and (Path(args.run) / "checkpoints").exists() else None
    target = load_target(json.loads(run.config.read_text())["target"]["id"] if run else args.run, args.dtype, "cpu")
    both = None
    if run:
        held = [c.input_ids[: c.prompt_length] for c in read_conversations(run.regen) if c.split == "heldout"]
        folder = args.checkpoint or sorted(run.checkpoints.glob("step-*"))[-1]
        both = pair(target, at_precision(load_drafter(folder, target.device), target.dtype))
    else:
        source = torch.Generator().manual_seed(0)
        held = [torch.randint(100, target.vocab_size, (40 + 7 * (n % 16),), generator=source).tolist() for n in range(args.prompts)]
    prompts = held[: args.prompts]
    result: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads, "new": args.new, "prompt_tokens": [len(ids) for ids in prompts]}
    if "split" in args.parts and both is not None:
        found = split(both, prompts[:4], args)
        result |= {"fixed_share": found["fixed_share"], "split": found}
        print(json.dumps(found), flush=True)
    if "ar" in args.parts:
        for batch, some in ((1, prompts[:3]), (16, prompts)):
            found = against_hugging_face(target, some, batch, args)
            result |= {f"ar_vs_hf_b{batch}": found["ratio"], f"ar_b{batch}": found}
            print(json.dumps(found), flush=True)
    if "measures" in args.parts:
        result["measures"] = measures(target, both, prompts, args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
