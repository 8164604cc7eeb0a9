"""What one unit costs, as somebody measured it: given on the command line, or read from a run. Nothing is guessed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from specgraft.config import RunConfig
from specgraft.log import read_metrics
from specgraft.records import read_conversations
from specgraft.run_dir import RunDir, read_json


@dataclass(frozen=True)
class Unit:
    """One measured number."""

    value: float
    source: str  # "given", or where it was measured


@dataclass(frozen=True)
class Units:
    """None: nobody has measured it. The name of a field is the option that gives it."""

    conversation_tokens: Unit | None = None  # mean of a conversation, prompt and answers, as captured
    answer_tokens: Unit | None = None  # of them those that the target wrote
    answer_tokens_per_second: Unit | None = None  # written by one server, or process, of regen
    producer_tokens_per_second: Unit | None = None  # prefilled by one producer
    rank_tokens_per_second: Unit | None = None  # trained on by one rank that never waits
    producer_gpus: Unit | None = None  # of one producer


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def given(**numbers: float | None) -> Units:
    """Numbers of the command line. Raises ValueError for one that is not above 0 (GPUs: below 0)."""
    found = {}
    for name, value in numbers.items():
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name != "producer_gpus"):
            raise ValueError(f"{option(name)} {value:g}: give a number above 0, as measured")
        found[name] = Unit(value, "given")
    return Units(**found)


def over(first: Units, second: Units) -> Units:
    """The numbers of `first`, and those of `second` where it has none."""
    return replace(second, **{field.name: unit for field in fields(Units) if (unit := getattr(first, field.name)) is not None})


def units_of(folder: Path, config: RunConfig, ranks: int = 1) -> Units:
    """What the stages of another run measured: lengths of its answers, seconds of its stages, speed of its steps without their waiting.

    `config`: the run that is planned, whose limit cuts the lengths; `ranks`: those that the other one trained with.
    Raises ValueError for a folder that holds neither answers nor metrics.
    """
    run = RunDir(folder)
    settings = read_json(run.config)
    seconds = read_json(run.timing) if run.timing.exists() else {}
    target = settings.get("target", {}).get("id")
    other = "" if target == config.target.id else f", of another target ({target})"
    found: dict[str, Unit] = {}
    rows = read_conversations(run.regen)
    if rows:
        limit = config.capture.max_length or math.inf
        lengths, written = [min(len(row.input_ids), limit) for row in rows], sum(sum(row.loss_mask) for row in rows)
        where = f"{len(rows):,} answers in {folder}{other}"
        found["conversation_tokens"] = Unit(sum(lengths) / len(rows), where)
        found["answer_tokens"] = Unit(written / len(rows), where)
        if spent := seconds.get("regen"):
            servers = len(settings.get("regen", {}).get("servers", [])) or 1
            found["answer_tokens_per_second"] = Unit(written / spent / servers, f"regen of {folder}, loading included{other}")
        if (spent := seconds.get("capture")) and (run.features / "manifest.json").is_file():
            servers = len(settings.get("capture", {}).get("servers", [])) or 1
            found["producer_tokens_per_second"] = Unit(sum(len(row.input_ids) for row in rows) / spent / servers, f"capture of {folder}{other}")
    if run.metrics.exists() and (steps := [row for row in read_metrics(run.metrics) if row.get("kind") == "train" and "tokens" in row]):
        steady = steps[len(steps) // 10 :]
        spent, waited = sum(row["seconds"] for row in steady), sum(row["stall_seconds"] for row in steady)
        where = f"{len(steady):,} steps of {folder} on {ranks} rank{'s' if ranks > 1 else ''}, which waited {waited / (spent + waited):.1%} besides{other}"
        found["rank_tokens_per_second"] = Unit(sum(row["tokens"] for row in steady) / spent / ranks, where)
    if not found:
        raise ValueError(f"--from {folder}: holds neither answers nor metrics; name the folder of a run that has begun")
    return Units(**found)
