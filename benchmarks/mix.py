"""A 6,400-prompt mix of a folder of prompts: quotas, families, near-duplicates and contamination, held against a second opinion.

    python benchmarks/mix.py DATA [--train 6000] [--held-out 400] [--seed 0] [--mixes NAME ...] [--json PATH]

DATA holds train/*.jsonl (prompts) and bench/*.jsonl (suites). Three mixes: the files alone, by weights that they can fill; the default
weights, where the built-in set fills up what the files lack; the same by two length bands, with a cell that cannot be filled.
`mix_oracle` shares no code with what it checks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from mix_oracle import naive_grams, raw_records, runs_shared, same_frame, similarities
from specgraft.config import RunConfig
from specgraft.regen.mix import Mix, draw, plan_lines

# what 9,456 prompts hold, 55 of 100 of them English, and few in Korean and Japanese code, math and tools
FILES = {"languages": {"en": 0.84, "ko": 0.09, "ja": 0.07}, "domains": {"chat": 0.27, "code": 0.27, "math": 0.235, "tool": 0.225}}
MIXES: dict[str, dict[str, Any]] = {
    "files": FILES,
    "files and built-in set": {},
    "two length bands": {"lengths": {"0-60": 0.6, "60-": 0.4}, "shortfall": "report"},
}


def config_of(data: Path, train: int, held_out: int, seed: int, name: str) -> RunConfig:
    files = [{"path": str(path)} for path in sorted((data / "train").glob("*.jsonl"))]
    if not files:
        raise SystemExit(f"{data}: holds no train/*.jsonl")
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "prompts": {
                "train": train,
                "held_out": held_out,
                "sources": files + ([] if name == "files" else [{"path": "builtin", "weight": 0.001}]),
                "suites": [str(path) for path in sorted((data / "bench").glob("*.jsonl"))],
                **MIXES[name],
            },
            "evaluate": {"prompts": 1},
        }
    )


def digest(mix: Mix) -> str:
    rows = [[split, prompt.to_json()] for split, prompts in mix.prompts.items() for prompt in prompts]
    return hashlib.sha256(json.dumps([rows, mix.report], sort_keys=True).encode()).hexdigest()[:16]


def elsewhere(arguments: list[str]) -> str:
    """The digest that another process finds, whose hashes of strings differ."""
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, __file__, *arguments, "--digest-only"], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def quotas(config: RunConfig, mix: Mix) -> dict[str, Any]:
    """Distance from the exact quotas, which are no whole numbers: the largest of one split in prompts, and the largest of the whole mix
    as a share, over cells and their sums by language, domain and length."""
    part = config.prompts
    axes = [part.languages, part.domains, part.lengths or {"all": 1.0}]
    names = ("language", "domain", "length")
    shares = [{name: weight / sum(axis.values()) for name, weight in axis.items()} for axis in axes]
    groups = [{names[place]: name} for place, axis in enumerate(axes) for name in axis]
    groups += [dict(zip(names, cell, strict=True)) for cell in product(*axes)]
    in_prompts = in_share = 0.0
    for group in groups:
        share = math.prod(shares[names.index(axis)][name] for axis, name in group.items())
        if share == 0:
            continue
        off = []
        for split, key in (("train", "train"), ("heldout", "held_out")):
            cells = mix.report["splits"][split]["cells"]
            got = sum(cell["got"] for cell in cells if all(cell[axis] == name for axis, name in group.items()))
            off.append(got - getattr(part, key) * share)
        in_prompts = max(in_prompts, *map(abs, off))
        in_share = max(in_share, abs(sum(off)) / ((part.train + part.held_out) * share))
    missing = sum(cell["wanted"] - cell["got"] for held in mix.report["splits"].values() for cell in held["cells"])
    return {"largest_off_in_a_split": round(in_prompts, 2), "largest_share_off": round(in_share, 4), "missing": missing}


def second_opinion(config: RunConfig, mix: Mix, data: Path) -> dict[str, Any]:
    part = config.prompts
    raw = raw_records(sorted((data / "train").glob("*.jsonl")))
    drawn = [(split, prompt) for split, prompts in mix.prompts.items() for prompt in prompts]
    records = {prompt.id: raw.get(prompt.id, prompt.to_json()) for _, prompt in drawn}
    sides: dict[str, set[str]] = {}
    for split, prompt in drawn:
        sides.setdefault(records[prompt.id]["family"], set()).add(split)
    crossing, left, highest = 0, 0, 0.0
    sets = [naive_grams(record) for record in records.values()]
    for place, found in similarities(sets):
        for other in (found >= part.same_family).nonzero()[0]:
            apart = drawn[place][0] != drawn[other][0]
            crossing += apart
            if found[other] >= part.near_duplicates:
                left += same_frame(records[drawn[place][1].id], records[drawn[other][1].id])
        across = [value for value, (split, _) in zip(found, drawn, strict=False) if split != drawn[place][0]]
        highest = max(highest, max(across, default=0.0))
    removed_wrongly = 0
    for row in mix.report["near_duplicates"]:
        if row["id"] in raw and row["kept"] in raw:
            one, other = naive_grams(raw[row["id"]]), naive_grams(raw[row["kept"]])
            removed_wrongly += abs(len(one & other) / len(one | other) - row["similarity"]) > 5e-5 or row["similarity"] < part.near_duplicates
    suites = {path: raw_records([path]) for path in sorted((data / "bench").glob("*.jsonl"))}
    hits = {path.stem: runs_shared(records, suite, part.contamination_words) for path, suite in suites.items()}
    return {
        "prompts": len(records),
        "ids_distinct": len(records) == len(drawn),
        "families_crossing": sum(len(side) > 1 for side in sides.values()),
        "pairs_crossing": int(crossing),
        "highest_similarity_across": round(float(highest), 4),
        "near_duplicates_left": int(left),
        "removed_wrongly": int(removed_wrongly),
        "contaminated_left": hits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--train", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--digest-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    configs = {name: config_of(args.data, args.train, args.held_out, args.seed, name) for name in args.mixes}
    if args.digest_only:
        print(" ".join(digest(draw(config)) for config in configs.values()))
        return
    given = ["--train", str(args.train), "--held-out", str(args.held_out), "--seed", str(args.seed)]
    others = elsewhere([str(args.data), *given, "--mixes", *args.mixes]).split()
    results = {}
    for (name, config), other in zip(configs.items(), others, strict=True):
        began = time.process_time()
        mix = draw(config)
        seconds = time.process_time() - began
        compared = sum(row["available"] + row["near_duplicates"] for row in mix.report["sources"])
        results[name] = {
            "compared": compared,
            "processor_seconds": round(seconds, 2),
            "quota": quotas(config, mix),
            "removed": len(mix.report["near_duplicates"]),
            "contaminated": mix.report["contaminated"],
            "families_joined": [len(row["of"]) for row in mix.report["joined"]],
            "digest": digest(mix),
            "same_in_another_process": digest(mix) == other,
            "second_opinion": second_opinion(config, mix, args.data),
            "splits": mix.report["splits"],
            "sources": mix.report["sources"],
        }
        print(f"== {name}\n" + "\n".join(plan_lines(mix.report)) + "\n")
        for key in ("compared", "processor_seconds", "quota", "digest", "same_in_another_process", "second_opinion"):
            print(f"{key}: {json.dumps(results[name][key])}")
        print()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
