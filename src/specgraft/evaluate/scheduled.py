"""Confidences put to use: calibration of a run's drafter, and the same prompts decoded under `evaluate.schedule`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specgraft.config import RunConfig
from specgraft.decode.costs import Costs
from specgraft.decode.loop import Request
from specgraft.decode.pair import Pair
from specgraft.decode.profile import profile
from specgraft.decode.scheduler import Scaling, Scheduler, make
from specgraft.evaluate import metrics
from specgraft.evaluate.calibration import calibration
from specgraft.evaluate.lossless import first_difference
from specgraft.log import progress
from specgraft.run_dir import read_json, write_json
from specgraft.targets.sampling import Law

Decode = Callable[[Scheduler, float], list[Request]]  # fresh requests of one temperature, decoded under a scheduler


def scaling(by_temperature: Mapping[float, Sequence[Request]], draft_tokens: int) -> dict[str, Any]:
    """Calibration of each law's rounds, under "t0", "t1", .."""
    return {
        f"t{temperature:g}": {
            "temperature": temperature,
            **calibration([(request.rounds, request.confidence) for request in requests], draft_tokens),
        }
        for temperature, requests in by_temperature.items()
    }


def write_scalings(path: Path, found: dict[str, Any], weights: str) -> None:
    """confidence.json: what a scheduler needs of this drafter, and which weights it belongs to."""
    laws = [{key: row[key] for key in ("temperature", "temperatures", "shifts")} for row in found.values()]
    write_json(path, {"weights": weights, "laws": laws})


def scalings_of(rows: Iterable[dict[str, Any]]) -> dict[float, Scaling]:
    """By the law's temperature, from rows of `scaling` or of confidence.json."""
    return {
        float(row["temperature"]): Scaling([float(t) for t in row["temperatures"]], [float(b) for b in row["shifts"]])
        for row in rows
    }


def read_scalings(path: Path, weights: str | None = None) -> dict[float, Scaling]:
    """What `write_scalings` left. Raises ValueError where the file is missing, damaged, or of other `weights`."""
    data = read_json(path)
    try:
        if weights is not None and data["weights"] != weights:
            raise ValueError(f"{path}: fitted for another checkpoint; run evaluate on this one")
        return scalings_of(data["laws"])
    except (KeyError, TypeError):
        raise ValueError(f"{path}: damaged; delete it and run evaluate again") from None


def costs_for(both: Pair, texts: Sequence[list[int]], config: RunConfig, temperature: float) -> Costs:
    """This machine's costs at the batch sizes and lengths of the evaluation."""
    part = config.evaluate
    rows = sorted({1, max(1, part.batch // 4), part.batch})
    longest = max(len(text) for text in texts)
    contexts = sorted({max(32, longest // 4), longest + part.max_new_tokens})
    with progress("profile", len(rows) * len(contexts)) as bar:
        done = iter(range(1, len(rows) * len(contexts) + 1))
        return profile(both, texts, rows, contexts, Law(temperature), step=lambda: bar.at(next(done)))


def scheduled(
    both: Pair, config: RunConfig, found: dict[str, Any], fixed: Mapping[float, Sequence[Request]], decode: Decode
) -> dict[str, Any]:
    """Accept length and drafts verified under `evaluate.schedule`, beside fixed length, and whether greedy text stayed."""
    part = config.evaluate
    scalings = scalings_of(found.values())
    out: dict[str, Any] = {"schedule": part.schedule, "threshold": part.threshold}
    for temperature, before in fixed.items():
        costs = None
        if part.schedule in ("prefix", "late"):
            costs = costs_for(both, [request.ids for request in before], config, temperature)
        after = decode(make(part.schedule, scalings, costs, part.threshold), temperature)
        row: dict[str, Any] = {"fixed": summary(before), "scheduled": summary(after)}
        if costs is not None:
            row["costs"] = costs.to_json()
        if temperature == 0:
            pairs = zip(before, after, strict=True)
            row["differs"] = sum(first_difference(a.output, b.output) is not None for a, b in pairs)
        out[f"t{temperature:g}"] = row
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """What `scheduled` found, a line for each temperature."""
    out = []
    for name, row in found.items():
        if not isinstance(row, dict) or not row["scheduled"]["rounds"]:
            continue
        fixed, after = row["fixed"], row["scheduled"]
        out.append(
            f"evaluate: schedule {found['schedule']} at T={name.removeprefix('t')}: {after['drafts_verified']:.2f} drafts verified a round "
            f"(fixed {fixed['drafts_verified']:.2f}), accept length {after['accept_length']:.3f} (fixed {fixed['accept_length']:.3f})"
            + (f", {row['differs']} texts differ" if "differs" in row else "")
        )
    return out


def summary(requests: Sequence[Request]) -> dict[str, Any]:
    """What was verified and what was accepted of it."""
    rounds = [request.rounds for request in requests]
    every = [verdict for mine in rounds for verdict in mine]
    verified, accepted = sum(v.proposed for v in every), sum(v.accepted for v in every)
    return {
        "accept_length": metrics.accept_length(rounds),
        "accept_length_pooled": metrics.accept_length_pooled(rounds),
        "drafts_verified": verified / len(every) if every else None,  # a round
        "draft_acceptance": accepted / verified if verified else None,
        "verify_rate": metrics.committed(every) / (verified + len(every)) if every else None,
        "rounds": len(every),
    }
