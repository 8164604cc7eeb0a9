"""Drafters side by side: same target, same features, same steps; accept length of the decode loop on held-out.

    python benchmarks/drafters.py RUN.toml [section.key=value ...] [--kinds dspark,dflash,mtp] [--seeds 0,1,2] [--json PATH]

A kind may carry settings: dspark+markov_head=rnn, dflash+distill.preset=dpace. With distill.preset=auto every kind minimises its
own published objective; name a preset to give all the same. Answers and features are those of the run file (made when
missing); every (kind, seed, settings) is a folder RUN/drafters/.. that resumes, and is read when done.
Prints a Markdown table: mean and spread over the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from compared import accepted, borrowed, run
from specgraft.config import RunConfig
from specgraft.evaluate.stage import held_out, load_pair
from specgraft.run import Session
from specgraft.run_dir import RunDir, read_json, write_json
from specgraft.run_file import load_config, parse_override, validate
from specgraft.train.checkpoint import latest
from specgraft.train.stage import train


def variant(config: RunConfig, kind: str, seed: int) -> RunConfig:
    """The run file with another drafter and seed. Settings behind a + without a section are the drafter's."""
    kind, *more = kind.split("+")
    data = config.model_dump(mode="json")
    data["run"]["seed"] = seed
    data["drafters"]["kind"] = kind
    for setting in more:
        keys, value = parse_override(setting)
        section, key = keys if len(keys) == 2 else ("drafters", keys[-1])
        data[section][key] = value
    return validate(data, f"{kind}, seed {seed}")


def folder_of(base: Session, config: RunConfig, kind: str, seed: int) -> RunDir:
    """A run folder that shares the base run's answers and features; other settings have another one."""
    parts = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "drafters", "distill", "train", "evaluate")}
    settings = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    return borrowed(base, "drafters", f"{kind}-{seed}-{settings}")


def measure(base: Session, kind: str, seed: int) -> dict[str, Any]:
    """Trains and decodes one drafter, or reads what an earlier run of this command measured."""
    config = variant(base.config, kind, seed)
    own = folder_of(base, config, kind, seed)
    result_path = own.root / "accept.json"
    if result_path.exists():
        return read_json(result_path)
    conversations = base.conversations()
    began = time.process_time()
    train(config, own, base.target, base.header, conversations)
    trained = time.process_time() - began
    folder = latest(own.checkpoints)
    both = load_pair(config, folder, config.evaluate.dtype)
    texts = held_out(config, own, [c.prompt_id for c in conversations if c.split == "heldout"])
    result: dict[str, Any] = {
        "kind": kind, "seed": seed, "steps": config.train.steps, "processor_seconds": trained,
        "parameters": sum(p.numel() for p in both.drafter.parameters()),
    }  # fmt: skip
    result |= accepted(both, texts, config)[0]
    write_json(result_path, result)
    return result


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, a line per kind: accept lengths (request mean, pooled), slot survival, size and cost."""
    lines = [
        "| drafter | T=0 request mean | pooled | T=1 request mean | pooled | survival of slots 1 2 3 at T=0 | parameters (M) | training, processor s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in rows.items():
        values = [spread([row[t][key] for row in found]) for t in ("t0", "t1") for key in ("accept_length", "accept_length_pooled")]
        depth = min(3, len(found[0]["t0"]["survival"]))
        slots = " ".join(f"{statistics.mean(row['t0']['survival'][slot] for row in found):.3f}" for slot in range(depth))
        cost = statistics.mean(row["processor_seconds"] for row in found)
        lines.append(f"| {kind} | {' | '.join(values)} | {slots} | {found[0]['parameters'] / 1e6:.1f} | {cost:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--kinds", default="dspark,dflash,mtp", help="commas between; kind+key=value for settings of one")
    parser.add_argument("--seeds", default="0,1,2", help="commas between")
    parser.add_argument("--json", type=Path, help="every row, and the config")
    run(parser, compare)


def compare(args: argparse.Namespace) -> None:
    """Checks every variant, then measures them."""
    base = Session(load_config(args.config, args.overrides))
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds.split(",")}
    for kind in rows:
        Session(variant(base.config, kind, seeds[0]))
    base.regen()
    base.capture()
    for seed in seeds:  # seed by seed: a stopped comparison has whole seeds
        for kind, found in rows.items():
            found.append(measure(base, kind, seed))
            print(f"{kind} seed {seed}: T=0 {found[-1]['t0']['accept_length']:.3f}, T=1 {found[-1]['t1']['accept_length']:.3f}", flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "config": base.config.model_dump(mode="json")}, indent=2) + "\n")


if __name__ == "__main__":
    main()
