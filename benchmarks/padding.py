"""How much of capture's forward passes is padding: batches by length over many shards, against sorting within each shard, against none.

    python benchmarks/padding.py FOLDER [FOLDER ...] [--batch-tokens 4096] [--shard-tokens 65536] [--max-length 0] [--json PATH]
    python benchmarks/padding.py --prompts FILE.jsonl [...] --tokenizer smollm2 [--number 6400] [--answers FOLDER]

A folder holds answers (RUN/regen). Prompt files hold {"messages", "tools"}: their lengths are those of the target's chat template, each
with the length of an answer drawn from `--answers` (a regen folder), or 128 tokens. No target is loaded: padding hangs on lengths alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specgraft.capture.batches import by_length, in_order, padded_tokens, shards_of
from specgraft.capture.cuts import shortened
from specgraft.records import read_conversations


def batches_of(lengths: Sequence[int], batch_tokens: int, shard_tokens: int, how: str) -> Iterator[list[int]]:
    """Batches as capture makes them ("window"), sorted within shards in the given order ("shard"), or not sorted ("none")."""
    if how == "window":
        yield from (batch for shard in shards_of(lengths, range(len(lengths)), batch_tokens, shard_tokens) for batch in shard)
        return
    for part in in_order(lengths, shard_tokens):
        if how == "shard":
            yield from ([part[place] for place in batch] for batch in by_length([lengths[index] for index in part], batch_tokens, 1.0))
            continue
        batch: list[int] = []
        for index in part:
            if batch and padded_tokens(lengths, [*batch, index]) > batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch


def waste(lengths: Sequence[int], batch_tokens: int, shard_tokens: int, how: str) -> dict[str, Any]:
    batches = list(batches_of(lengths, batch_tokens, shard_tokens, how))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    padded = sum(padded_tokens(lengths, batch) for batch in batches)
    return {"passes": len(batches), "padded": padded, "waste": 1 - sum(lengths) / padded}


def by_split(folder: Path, max_length: int) -> list[list[int]]:
    """Lengths of a regen folder's rows as capture cuts them, train and held-out apart."""
    rows, _ = shortened(read_conversations(folder), max_length)
    return [mine for split in ("train", "heldout") if (mine := [len(row.input_ids) for row in rows if row.split == split])]


def rendered(paths: Sequence[Path], name: str, number: int, answers: Path | None, max_length: int) -> list[list[int]]:
    """Lengths of prompts drawn from the files, each with an answer."""
    from specgraft.targets.text import load_text

    tokenizer = load_text(name).tokenizer
    source = random.Random(0)
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").split("\n") if line]
    source.shuffle(rows)
    new = [sum(row.loss_mask) for row in read_conversations(answers)] if answers else [128]
    lengths = []
    for row in rows:
        messages = [{"role": m["role"], "content": m.get("content") or json.dumps(m.get("tool_calls", ""))} for m in row["messages"]]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + json.dumps(row.get("tools") or "")
        length = len(tokenizer(text)["input_ids"]) + source.choice(new)
        lengths.append(min(length, max_length) if max_length else length)
        if len(lengths) == number:
            break
    return [lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    parser.add_argument("--tokenizer", default="smollm2")
    parser.add_argument("--number", type=int, default=6400)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--shard-tokens", type=int, default=65536)
    parser.add_argument("--max-length", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sets = {str(folder): by_split(folder, args.max_length) for folder in args.folders}
    if args.prompts:
        sets["prompts"] = rendered(args.prompts, args.tokenizer, args.number, args.answers, args.max_length)
    found: dict[str, Any] = {}
    print("| answers | rows | tokens | length (shortest, median, longest) | not sorted | within shards | capture | passes |\n|---|---|---|---|---|---|---|---|")
    for name, splits in sets.items():
        every = sorted(length for lengths in splits for length in lengths)
        row: dict[str, Any] = {"rows": len(every), "tokens": sum(every)}
        for how in ("none", "shard", "window"):
            parts = [waste(lengths, args.batch_tokens, args.shard_tokens, how) for lengths in splits]
            padded, passes = (sum(part[key] for part in parts) for key in ("padded", "passes"))
            row[how] = {"padded": padded, "passes": passes, "waste": 1 - sum(every) / padded}
        found[name] = row
        cells = [f"{row[how]['waste']:.2%}" for how in ("none", "shard", "window")]
        counts = " / ".join(str(row[how]["passes"]) for how in ("none", "shard", "window"))
        print(f"| {name} | {len(every)} | {sum(every)} | {every[0]}, {every[len(every) // 2]}, {every[-1]} | {' | '.join(cells)} | {counts} |", flush=True)
    if args.json:
        settings = {key: str(value) if isinstance(value, (Path, list)) else value for key, value in vars(args).items()}
        args.json.write_text(json.dumps({"sets": found, "settings": settings}, indent=2) + "\n")


if __name__ == "__main__":
    main()
