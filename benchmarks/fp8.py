"""What features in fp8 cost: the same drafter trained on features in the target's dtype and in fp8, equal steps and seeds, and decoded.

    python benchmarks/fp8.py RUN.toml [section.key=value ...] [--seeds 0,1] [--json PATH]

Answers are those of the run file (made where they are missing). Features and checkpoints are kept under RUN/fp8/. Prints a Markdown
table: bytes on disk, accept length of the decode loop at T=0 and T=1, and the expected one of fixed texts at T=1, with the
change against the target's dtype (95 % intervals: bootstrap over prompts, all seeds of a prompt together).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compared import run
from onpolicy import COLUMNS, Base, interval, judge_of, measured, with_settings
from specgraft.capture.stage import capture
from specgraft.drafters.store import load_drafter
from specgraft.plan.storage import size_text
from specgraft.records import Conversation
from specgraft.run import Session
from specgraft.run_dir import RunDir, read_json
from specgraft.run_file import load_config
from specgraft.stream.shards import MANIFEST
from specgraft.train.checkpoint import latest
from specgraft.train.stage import train

DTYPES = ("target", "fp8")


def answers(session: Session) -> list[Conversation]:
    """Those that are there, else made now."""
    try:
        return session.conversations()
    except ValueError:
        return session.regen()


def captured(session: Session, conversations: list[Conversation], dtype: str) -> tuple[Session, dict[str, Any]]:
    """A session whose features have this dtype, and what they weigh."""
    config = with_settings(session.config, {"capture.dtype": dtype, "run.root": str(session.run.root / "fp8"), "run.name": dtype}, dtype)
    own = Session(config)
    own.__dict__["target"] = session.target  # loaded once
    own.run.create()
    if not own.run.regen.exists():
        own.run.regen.symlink_to(session.run.regen.resolve())
    capture(config, own.run, session.target, conversations)
    shards = read_json(own.run.features / MANIFEST)["shards"]
    found: dict[str, Any] = {"bytes": sum(shard["bytes"] for shard in shards), "tokens": sum(row["tokens"] for s in shards for row in s["rows"])}
    if dtype == "fp8":
        errors = [shard["round_trip_error"] for shard in shards]
        found["round_trip_error"] = {name: {"mean": np.mean([e[name]["mean"] for e in errors]), "worst": max(e[name]["worst"] for e in errors)} for name in errors[0]}
    return own, found


def trained(own: Session, conversations: list[Conversation], seed: int) -> Path:
    """Checkpoint of this seed."""
    config = with_settings(own.config, {"run.seed": seed}, str(seed))
    folder = RunDir(own.run.root / f"seed-{seed}").create()
    if not folder.features.exists():
        folder.features.symlink_to(own.run.features.resolve())
    train(config, folder, own.target, own.header, conversations)
    return latest(folder.checkpoints)


def compare(args: argparse.Namespace) -> None:
    session = Session(load_config(args.config, args.overrides))
    if session.config.run.threads:
        torch.set_num_threads(session.config.run.threads)
    conversations = answers(session)
    judge = judge_of(session)
    texts: list[list[int]] | None = None
    found: dict[str, dict[str, Any]] = {}
    made = {dtype: captured(session, conversations, dtype) for dtype in DTYPES}
    for seed in (int(text) for text in args.seeds.split(",")):
        for dtype, (own, weight) in made.items():
            start = trained(own, conversations, seed)
            row = measured(Base(session, session.config, own.run.root, start, judge), load_drafter(start, judge.device), texts)
            texts = texts or row["texts"]
            found.setdefault(dtype, {**weight, "rows": []})["rows"].append({"seed": seed, **row})
            print(f"{dtype} seed {seed}: " + " ".join(f"{row[at]['accept_length']:.4f}" for at in COLUMNS), flush=True)
    print(table(found, session.config.target.dtype))
    if args.json:
        args.json.write_text(json.dumps({"features": found, "config": session.config.model_dump(mode="json")}, indent=2) + "\n")


def per_prompt(found: dict[str, Any], at: str) -> np.ndarray:
    """[prompts] accept length, mean over seeds; NaN where a prompt has no round."""
    return np.array([row[at]["per_request"] for row in found["rows"]], dtype=float).mean(0)


def table(found: dict[str, dict[str, Any]], dtype: str) -> str:
    """Markdown, a line per dtype."""
    lines = [
        "| features | bytes | share | " + " | ".join(f"{name} (change, 95 %)" for name in COLUMNS.values()) + " |",
        "|---|---|---" + "|---" * len(COLUMNS) + "|",
    ]
    base = found[DTYPES[0]]
    for name, mine in found.items():
        cells = []
        for at in COLUMNS:
            left, right = per_prompt(base, at), per_prompt(mine, at)
            there = ~(np.isnan(left) | np.isnan(right))
            change, low, high = (100 * x / left[there].mean() for x in interval(right[there] - left[there]))
            cells.append(f"{right[there].mean():.4f}" + (f" ({change:+.2f} %, {low:+.2f} to {high:+.2f})" if mine is not base else ""))
        lines.append(f"| {dtype if name == 'target' else name} | {size_text(mine['bytes'])} | {mine['bytes'] / base['bytes']:.2%} | {' | '.join(cells)} |")
    if error := found["fp8"].get("round_trip_error"):
        lines += ["", f"relative error of a state in fp8: {json.dumps(error)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--seeds", default="0,1", help="commas between")
    parser.add_argument("--json", type=Path, help="every row, and the config")
    run(parser, compare)


if __name__ == "__main__":
    main()
