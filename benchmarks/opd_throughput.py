"""Supervised tokens per second of SpecOPD and of Draft-OPD: same drafter, target and batches of references, one process.

    python benchmarks/opd_throughput.py RUN.toml [section.key=value ...] [--start FOLDER] [--updates 4] [--anchors 16,32,64] [--branches 1] [--json PATH]

Draft-OPD decodes the prompts of a batch with the drafter (all rows together), replays the rounds and learns; SpecOPD draws
branches on the reference answers, has them scored in one pass, and learns. An update is forward, backward and optimizer
step, on features of RUN, made when missing. The methods take turns within an update, so that a busy machine slows both.
A supervised token is a slot with a loss. Prints a Markdown table: medians over the updates; a line for every number of anchors.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from compared import features, prepare, run
from specgraft.config import RunConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.run import Session
from specgraft.run_file import load_config, validate
from specgraft.train.batch import step_batches
from specgraft.train.optimizer import Optimizer
from specgraft.train.setup import mask_token, new_drafter
from specgraft.train.stage import summary
from specgraft.train.tasks import task_of


class Method:
    """One way to learn, with a drafter and an optimizer of its own."""

    def __init__(self, session: Session, name: str, preset: str, drafter: Drafter, more: dict[str, Any]) -> None:
        data = session.config.model_dump(mode="json")
        data["distill"] |= {key: None for key, value in data["distill"].items() if key in LOSSES and value is not None}
        data["distill"] |= {"preset": preset, "slot_sampling": False}
        for key, value in more.items():
            section, field = key.split(".")
            data[section][field] = value
        self.config: RunConfig = validate(data, name)
        self.name, self.session, self.drafter = name, session, copy.deepcopy(drafter).train()
        target, part = session.target, self.config.train
        self.optimizer = Optimizer(self.drafter, part)
        shared = Shared.of(target, mask_token(self.config, target))
        self.learn = task_of(self.config, self.config.distill, target, self.drafter, shared, None)
        reader = features(session)
        ends = target.end_ids if self.config.distill.origin == "branches" else None
        self.batches = step_batches(
            reader, part.rows, part.anchors, self.config.drafters.draft_tokens, part.max_length, self.config.run.seed, 0, 10**9,
            target.device, 0, ends,
        )  # fmt: skip
        self.rows: list[dict[str, Any]] = []

    def update(self, step: int) -> None:
        batch = next(self.batches)
        device = self.session.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began, spent = time.perf_counter(), time.process_time()
        outcome = self.learn(batch, step)
        outcome.loss.backward()
        self.optimizer.step(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall, spent = time.perf_counter() - began, time.process_time() - spent
        seconds = wall if device.type == "cuda" else spent  # other work shares the cores
        row = summary(outcome, wall)
        split = {name: row.get(f"{name}_seconds", 0.0) for name in ("sample", "score", "learn")}
        self.rows.append({"tokens": row["slots"], "seconds": seconds, "wall": wall, **split})

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)

    def figures(self) -> dict[str, float]:
        found = {key: self.median(key) for key in ("tokens", "seconds", "sample", "score", "learn")}
        found["tokens_per_second"] = statistics.median(row["tokens"] / row["seconds"] for row in self.rows)
        found["updates_per_second"] = statistics.median(1 / row["seconds"] for row in self.rows)
        return found


LOSSES = {"ce", "kl", "rkl", "jsd", "tv", "l1", "lk_alpha", "lk_hybrid", "dpace", "e2e_tv", "selector", "confidence"}


def compare(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides)
    session = Session(config)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    prepare(session)
    if args.start:
        data = config.model_dump(mode="json")
        data["drafters"] |= {"warm_from": args.start, "warm_layers": "none", "warm_fc": "none", "warm_markov": False}
        config = validate(data, "--start")
    drafter = new_drafter(config, session.target, session.header["taps"], session.conversations())
    methods = [Method(session, "Draft-OPD", "draft_opd", drafter, {})]
    for count in map(int, args.anchors.split(",")):
        more = {"train.anchors": count, "distill.branches_per_anchor": args.branches}
        methods.append(Method(session, f"SpecOPD, {count} anchors x {args.branches}", "specopd", drafter, more))
    for step in range(args.updates + 1):
        for method in methods:
            method.update(step)
            print(f"{method.name}: update {step}: {method.rows[-1]['tokens']} tokens in {method.rows[-1]['seconds']:.2f} s", flush=True)
    for method in methods:
        del method.rows[0]  # what is made once
    base = methods[0].figures()
    lines = [
        "| | tokens per update | updates per s | tokens per s | x tokens per update | x updates per s | x tokens per s | sample, score, learn (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = {}
    for method in methods:
        own = method.figures()
        ratios = {
            "tokens_per_update_ratio": own["tokens"] / base["tokens"],
            "updates_ratio": own["updates_per_second"] / base["updates_per_second"],
            "supervised_tokens_ratio": own["tokens_per_second"] / base["tokens_per_second"],
        }
        found[method.name] = own | ratios | {"rows": method.rows}
        lines.append(
            f"| {method.name} | {own['tokens']:.0f} | {own['updates_per_second']:.3f} | {own['tokens_per_second']:.0f} | "
            f"{' | '.join(f'{value:.2f}' for value in ratios.values())} | {own['sample']:.2f}, {own['score']:.2f}, {own['learn']:.2f} |"
        )
    print("\n".join(lines))
    if args.json:
        best = max(list(found.values())[1:], key=lambda row: row["supervised_tokens_ratio"])
        top = {key: best[key] for key in ("supervised_tokens_ratio", "updates_ratio", "tokens_per_update_ratio")}
        args.json.write_text(json.dumps({**top, "methods": found, "config": session.config.model_dump(mode="json")}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--start", default="", help="folder of the drafter's checkpoint; random weights without")
    parser.add_argument("--updates", type=int, default=4, help="timed ones, after one that is not")
    parser.add_argument("--anchors", default="32,64", help="of SpecOPD, per reference; commas between")
    parser.add_argument("--branches", type=int, default=1, help="of SpecOPD, per anchor")
    parser.add_argument("--json", type=Path, help="ratios of the best SpecOPD line, and every row")
    run(parser, compare)


if __name__ == "__main__":
    main()
