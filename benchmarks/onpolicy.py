"""Four ways to go on with a drafter, from the same checkpoint and under the same budgets; accept length of the decode loop.

    python benchmarks/onpolicy.py RUN.toml [section.key=value ...] [--kinds dspark,dflash] [--methods ce,e2e_tv,specopd,draft_opd]
        [--seeds 0,1,2] [--steps 60] [--lr 3e-5] [--start dspark=FOLDER] [--json PATH]

Every kind starts from a checkpoint (`--start`, else trained off-policy by the run file). SpecOPD then takes `--steps` steps; the
slots it supervised and the seconds it took (of the processor on a CPU) are the two budgets: every method goes on until it has both, and is
decoded on the held-out prompts when it reaches each. Methods are presets of `distill.preset` (specopd+key=value for settings);
the learning rate is constant after its warm-up. Results are files under RUN/onpolicy/ and are not computed again.
Prints Markdown tables: accept length with 95 % intervals (bootstrap over prompts, all seeds of a prompt together), the change
against off-policy cross-entropy, and survival at every position.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compared import accepted, borrowed, features, prepare, run
from specgraft.config import RunConfig
from specgraft.decode.pair import pair
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.precision import at_precision
from specgraft.drafters.shared import Shared
from specgraft.drafters.store import WEIGHTS, load_drafter
from specgraft.evaluate.predicted import predict
from specgraft.evaluate.stage import held_out, prompt_of
from specgraft.log import Metrics
from specgraft.run import Session
from specgraft.run_dir import read_json, write_json
from specgraft.run_file import load_config, parse_override, validate
from specgraft.targets.load import digest, load_target
from specgraft.targets.model import Target
from specgraft.targets.sampling import Law
from specgraft.train.batch import step_batches
from specgraft.train.checkpoint import latest
from specgraft.train.optimizer import Optimizer
from specgraft.train.setup import mask_token, new_drafter
from specgraft.train.stage import summary, train
from specgraft.train.tasks import task_of

BUDGETS = ("slots", "seconds")
LIMIT = 40  # a method that is this many times slower than SpecOPD is stopped: its row then says how far it came


@dataclass
class Base:
    """What all continuations of one drafter kind share."""

    session: Session
    config: RunConfig  # of this kind
    folder: Path
    start: Path  # checkpoint
    judge: Target  # at the precision of evaluation

    @cached_property
    def inputs(self) -> list[str]:
        """Digests of what results depend on beside settings: the starting weights, and the features (their manifest names the
        target's weights)."""
        return [digest(self.start / WEIGHTS), features(self.session).digest()]


def with_settings(config: RunConfig, settings: dict[str, Any], where: str) -> RunConfig:
    data = config.model_dump(mode="json")
    for name, value in settings.items():
        section, key = name.split(".")
        data[section][key] = value
    return validate(data, where)


def judge_of(session: Session) -> Target:
    part = session.config
    if part.evaluate.dtype == part.target.dtype:
        return session.target
    return load_target(part.target.id, part.evaluate.dtype, part.run.device, part.target.remote_code)


def start_of(session: Session, kind: str, given: dict[str, str], judge: Target) -> Base:
    """The checkpoint that every continuation of `kind` starts from."""
    config = with_settings(session.config, {"drafters.kind": kind}, kind)
    if kind in given:
        return Base(session, config, session.run.root / "onpolicy" / kind, Path(given[kind]), judge)
    parts = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "drafters", "distill", "train")}
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    own = borrowed(session, "onpolicy", f"start-{kind}-{name}")
    train(config, own, session.target, session.header, session.conversations())
    return Base(session, config, session.run.root / "onpolicy" / kind, latest(own.checkpoints), judge)


def measured(base: Base, drafter: Drafter, texts: list[list[int]] | None = None) -> dict[str, Any]:
    """Accept length on the held-out prompts at both temperatures.

    `expected`: that of fixed texts drawn by the target at T=1, by the exact expectation over rounds (algorithms.md 3.12): no
    draws, so that small changes show. Without `texts` those of this very decoding are taken, and given back as "texts".
    """
    config, target = base.config, base.judge
    both = pair(target, at_precision(copy.deepcopy(drafter).eval(), target.dtype))
    prompts = held_out(config, base.session.run, [c.prompt_id for c in base.session.conversations() if c.split == "heldout"])
    found, requests = accepted(both, prompts, config)
    if texts is None:
        texts = found["texts"] = [request.output for request in requests]
    each = [predict(both, prompt_of(prompt), text, Law(1.0)) for prompt, text in zip(prompts, texts, strict=False)]
    kept = [one.tokens / one.rounds if one else None for one in each]
    found["expected"] = {"per_request": kept, "accept_length": float(np.mean([x for x in kept if x is not None]))}
    return found


def go_on(
    base: Base, method: str, seed: int, args: argparse.Namespace, budget: dict[str, float] | None, texts: list[list[int]]
) -> dict[str, Any]:
    """One continuation, or what an earlier run of this command measured. `budget` None: this one sets it by its steps."""
    preset, *more = method.split("+")
    settings: dict[str, Any] = {
        "run.seed": seed, "distill.preset": preset, "drafters.warm_from": str(base.start), "drafters.warm_layers": "none",
        "drafters.warm_fc": "none", "drafters.warm_markov": False, "train.steps": args.steps, "train.lr": args.lr,
        "train.min_lr_ratio": 1.0, "distill.slot_sampling": False,
    }  # fmt: skip
    for weight in ("ce", "kl", "rkl", "jsd", "tv", "l1", "lk_alpha", "lk_hybrid", "dpace", "e2e_tv", "selector", "confidence"):
        settings[f"distill.{weight}"] = None  # the preset's own
    for text in more:
        keys, value = parse_override(text)
        settings[".".join(keys) if len(keys) == 2 else f"distill.{keys[-1]}"] = value
    config = with_settings(base.config, settings, method)
    parts = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "drafters", "distill", "train", "evaluate")}
    name = hashlib.sha256(json.dumps([parts, budget, base.inputs], sort_keys=True).encode()).hexdigest()[:8]
    path = base.folder / f"{method}-{seed}-{name}.json"
    if path.exists():
        return read_json(path)
    session, target = base.session, base.session.target
    conversations = session.conversations()
    reader = features(session)
    drafter = new_drafter(config, target, session.header["taps"], conversations)
    drafter.train()
    shared, optimizer = Shared.of(target, mask_token(config, target)), Optimizer(drafter, config.train)
    learn = task_of(config, config.distill, target, drafter, shared, None)
    part, branches = config.train, config.distill.origin == "branches"
    batches = step_batches(
        reader, part.rows, part.anchors, config.drafters.draft_tokens, part.max_length, seed, 0, 10**9, target.device,
        0, target.end_ids if branches else None,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".jsonl").unlink(missing_ok=True)
    log = Metrics(path.with_suffix(".jsonl"))
    clock = time.process_time if target.device.type == "cpu" else time.monotonic  # other work shares the cores
    spent = dict.fromkeys(BUDGETS, 0.0)
    reached: dict[str, Any] = {}
    step = 0
    while True:
        began, wall = clock(), time.monotonic()
        batch = next(batches)
        outcome = learn(batch, step)
        outcome.loss.backward()
        optimizer.step(step)
        step += 1
        spent["seconds"] += clock() - began
        row = summary(outcome, time.monotonic() - wall)
        spent["slots"] += row["slots"]
        log.add(kind="train", step=step, **row)
        if budget is None:
            if step == args.steps:
                now = {"steps": step, **spent, **measured(base, drafter, texts)}
                reached = dict.fromkeys(BUDGETS, now)
                break
            continue
        crossed = [name for name in BUDGETS if name not in reached and spent[name] >= budget[name]]
        if crossed:
            now = {"steps": step, **spent, **measured(base, drafter, texts)}
            reached |= dict.fromkeys(crossed, now)
        if len(reached) == len(BUDGETS):
            break
        if spent["seconds"] > LIMIT * budget["seconds"]:
            reached["slots"] = {"steps": step, **spent, **measured(base, drafter, texts), "stopped": True}
            break
    result = {"method": method, "seed": seed, "budget": budget or spent, "reached": reached}
    write_json(path, result)
    return result


def interval(per_prompt: np.ndarray, draws: int = 2000) -> tuple[float, float, float]:
    """Mean of values [prompts] and its 95 % interval by bootstrap over prompts."""
    source = np.random.default_rng(0)
    means = per_prompt[source.integers(0, len(per_prompt), (draws, len(per_prompt)))].mean(1)
    return float(per_prompt.mean()), *(float(x) for x in np.quantile(means, (0.025, 0.975)))


def values(rows: list[dict[str, Any]], budget: str, at: str) -> np.ndarray:
    """[prompts] accept length of each, mean over seeds; prompts without a round are left out."""
    every = np.array([row["reached"][budget][at]["per_request"] for row in rows], dtype=float)
    return every.mean(0)[~np.isnan(every).any(0)]


COLUMNS = {"t0": "T=0", "t1": "T=1", "expected": "T=1, expected"}


def table(kind: str, start: dict[str, Any], rows: dict[str, list[dict[str, Any]]], against: str) -> str:
    """Markdown: a line per method and budget."""
    lines = [f"### {kind}"]
    for budget in BUDGETS:
        seeds = len(next(iter(rows.values())))
        heads = [f"{name} (95 %) | against {against}" for name in COLUMNS.values()]
        lines += [
            "", f"Equal {'supervised slots' if budget == 'slots' else 'seconds'}, {seeds} seeds", "",
            f"| method | steps | slots | seconds | {' | '.join(heads)} | survival at T=1, positions 1 .. |",
            "|---|---|---|---" + "|---" * (2 * len(heads) + 1) + "|",
        ]  # fmt: skip
        cells = [f"{start[at]['accept_length']:.3f} | " for at in COLUMNS]
        lines.append(f"| start | 0 | 0 | 0 | {' | '.join(cells)} | {survival([start['t1']['survival']])} |")
        for method, found in rows.items():
            reached = [row["reached"][budget] for row in found]
            cells = []
            for at in COLUMNS:
                mine = values(found, budget, at)
                mean, low, high = interval(mine)
                cells.append(f"{mean:.3f} ({low:.3f} to {high:.3f})")
                if method == against or against not in rows:
                    cells.append("")
                    continue
                base = values(rows[against], budget, at)
                change, low, high = (100 * x / base.mean() for x in interval(mine - base))
                cells.append(f"{change:+.2f} % ({low:+.2f} to {high:+.2f})")
            mark = " (stopped)" if any(row.get("stopped") for row in reached) else ""
            cost = [np.mean([row[key] for row in reached]) for key in ("steps", "slots", "seconds")]
            shown = survival([row["t1"]["survival"] for row in reached])
            lines.append(f"| {method}{mark} | {cost[0]:.0f} | {cost[1]:.0f} | {cost[2]:.0f} | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


def survival(rows: list[list[float]]) -> str:
    return " ".join(f"{value:.3f}" for value in np.array(rows).mean(0))


def compare(args: argparse.Namespace) -> None:
    session = Session(load_config(args.config, args.overrides))
    if session.config.run.threads:
        torch.set_num_threads(session.config.run.threads)
    given = dict(text.split("=", 1) for text in args.start)
    methods, seeds = args.methods.split(","), [int(seed) for seed in args.seeds.split(",")]
    prepare(session)
    found: dict[str, Any] = {}
    judge = judge_of(session)
    for kind in args.kinds.split(","):
        base = start_of(session, kind, given, judge)
        cached = base.folder / f"start-{hashlib.sha256(f'{base.inputs}{base.config.evaluate}'.encode()).hexdigest()[:8]}.json"
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_json(cached, measured(base, load_drafter(base.start, judge.device)))
        start = read_json(cached)
        rows: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        for seed in seeds:  # seed by seed: a stopped comparison has whole seeds, and the seconds were measured at one time
            first = go_on(base, "specopd", seed, args, None, start["texts"])
            budget = first["budget"]
            for method, mine in rows.items():
                mine.append(first if method == "specopd" else go_on(base, method, seed, args, budget, start["texts"]))
                at = mine[-1]["reached"]
                said = [f"equal {b} " + " ".join(f"{at[b][c]['accept_length']:.3f}" for c in COLUMNS) for b in BUDGETS if b in at]
                print(f"{kind} {method} seed {seed}: {'; '.join(said)} (T=0, T=1, expected at T=1)", flush=True)
        found[kind] = {"start": start, "rows": rows}
        print(table(kind, start, rows, "ce"), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"kinds": found, "config": session.config.model_dump(mode="json")}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="run file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--kinds", default="dspark,dflash", help="commas between")
    parser.add_argument("--methods", default="ce,e2e_tv,specopd,draft_opd", help="commas between; preset+key=value for settings of one")
    parser.add_argument("--seeds", default="0,1,2", help="commas between")
    parser.add_argument("--steps", type=int, default=60, help="of SpecOPD; they set both budgets")
    parser.add_argument("--lr", type=float, default=3e-5, help="of every continuation")
    parser.add_argument("--start", action="append", default=[], help="KIND=FOLDER of a checkpoint to start from")
    parser.add_argument("--json", type=Path, help="every row, and the config")
    run(parser, compare)


if __name__ == "__main__":
    main()
