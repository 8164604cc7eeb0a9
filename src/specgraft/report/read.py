"""What a run has left behind so far. Nothing here fails: a part that is missing or damaged is None, and is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from specgraft.log import read_metrics
from specgraft.run_dir import RunDir, read_json


@dataclass(frozen=True)
class Found:
    """The files of a run, parsed. Filled by `found`."""

    name: str
    config: dict[str, Any] | None  # RunConfig.model_dump()
    summary: dict[str, Any] | None
    gates: list[dict[str, Any]] | None  # GateResult.to_json() each
    metrics: list[dict[str, Any]]  # rows of metrics.jsonl
    evaluation: dict[str, Any] | None
    timing: dict[str, Any] | None  # stage -> seconds
    data: dict[str, Any] | None  # counts of the answered conversations
    damaged: tuple[str, ...]  # one line each
    mix: dict[str, Any] | None = None  # the drawn mix: its report, and what it was drawn from
    bench: dict[str, Any] | None = None  # an engine with and without drafters
    start: Start | None = None  # None: not started from another drafter


@dataclass(frozen=True)
class Start:
    """The drafter a run went on with (`drafters.warm_from`), and what is known of the run that made it."""

    name: str
    config: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    missing: str = ""  # why there is no evaluation of that very drafter


def found(run: RunDir) -> Found:
    """Reads what is there."""
    damaged: list[str] = []

    def one(path: Path, read: Callable[[Path], Any], kind: type) -> Any:
        if not path.exists():
            return None
        try:
            value = read(path)
        except (OSError, ValueError) as error:
            damaged.append(str(error))
            return None
        if not isinstance(value, kind):
            damaged.append(f"{path}: holds no {kind.__name__}")
            return None
        return value

    config = one(run.config, read_json, dict)
    gates = one(run.gates, read_json, dict)
    rows = gates.get("gates") if gates else None
    return Found(
        name=str(at(config, "run", "name") or run.root.resolve().name),
        config=config,
        summary=one(run.summary, read_json, dict),
        gates=[row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None,
        metrics=[row for row in one(run.metrics, read_metrics, list) or [] if isinstance(row, dict)],
        evaluation=one(run.evaluation, read_json, dict),
        timing=one(run.timing, read_json, dict),
        data=one(run.data, read_json, dict),
        mix=one(run.prompts / "mix.json", read_json, dict),
        bench=one(run.bench / "bench.json", read_json, dict),
        damaged=tuple(damaged),
        start=_start(config),
    )


def _start(config: dict[str, Any] | None) -> Start | None:
    """Of a run folder or a checkpoint inside one. An evaluation of another checkpoint than the one taken does not count."""
    named = at(config, "drafters", "warm_from")
    if not isinstance(named, str) or not named:
        return None
    folder = Path(named)
    inside = folder.parent.name == "checkpoints"
    run = RunDir(folder.parent.parent if inside else folder)
    name = f"{run.root.name}/{folder.name}" if inside else folder.name
    if not folder.is_dir():
        return Start(name, missing="its folder is not there any more")
    if not run.evaluation.exists():
        return Start(name, missing="it has no evaluate.json")
    try:
        evaluation = read_json(run.evaluation)
        before = read_json(run.config) if run.config.exists() else None
        taken = folder.name if inside else max((path.name for path in run.checkpoints.glob("step-*")), default="")
    except (OSError, ValueError) as error:
        return Start(name, missing=str(error))
    measured = at(evaluation, "settings", "checkpoint")
    measured = Path(measured).name if isinstance(measured, str) else ""
    if taken and measured and taken != measured:
        return Start(name, before, missing=f"it was evaluated at {measured}, not at {taken}")
    return Start(name, before, evaluation)


def at(value: Any, *keys: str) -> Any:
    """`value[k1][k2]...`, or None where something on the way is not there."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def numbers(value: Any) -> list[float]:
    """A list of numbers with NaN for what is none; empty when `value` is no list."""
    return [float(part) if is_number(part) else math.nan for part in value] if isinstance(value, list) else []


def draft_tokens(run: Found) -> int | None:
    """G, from the config or, failing that, from the number of measured positions."""
    value = at(run.config, "drafters", "draft_tokens")
    if is_number(value):
        return int(value)
    return len(numbers(at(run.evaluation, "t0", "survival"))) or None
