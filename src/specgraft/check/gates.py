"""The gates of a run: their names, where results are kept, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specgraft.records import GateResult
from specgraft.run_dir import RunDir, read_json, write_json

NAMES = (
    "token identity",
    "tap identity",
    "distribution identity",
    "overfit",
    "agreement",
    "engine agreement",
    "lossless",
    "export",
)


class GateError(ValueError):
    """A gate failed and was not allowed to; the command line ends with exit code 3."""

    exit_code = 3


def check_names(allow: Collection[str]) -> frozenset[str]:
    """The set of gates that may fail. Raises ValueError for a name that is no gate."""
    for name in allow:
        if name not in NAMES:
            raise ValueError(f"--allow {name!r}: no such gate; the gates are {', '.join(NAMES)}")
    return frozenset(allow)


def record(run: RunDir, results: Sequence[GateResult], allow: Collection[str] = frozenset()) -> list[dict[str, Any]]:
    """Merges results into `run.gates` by name, whole or not at all; a later result replaces an earlier one.

    The rows are GateResult fields, and "allowed": true where a failure was allowed. Returns all rows, in order of NAMES.
    """
    allowed = check_names(allow)
    rows = {row["name"]: row for row in recorded(run)}
    for result in results:
        rows[result.name] = result.to_json()
        if not result.passed and result.name in allowed:
            rows[result.name]["allowed"] = True
    order = {name: place for place, name in enumerate(NAMES)}
    merged = sorted(rows.values(), key=lambda row: order.get(row["name"], len(order)))
    write_json(run.gates, {"gates": merged})
    return merged


def recorded(run: RunDir) -> list[dict[str, Any]]:
    """Rows of `run.gates`, empty when there is no such file. Raises ValueError for a damaged one."""
    if not run.gates.is_file():
        return []
    data = read_json(run.gates)
    rows = data.get("gates") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise ValueError(f"{run.gates}: damaged; delete it and run check again")
    return rows


def require(results: Sequence[GateResult], allow: Collection[str] = frozenset()) -> None:
    """Raises GateError, in one line, naming every failed gate that is not in `allow`, its figure, and the way around."""
    allowed = check_names(allow)
    failed = [result for result in results if not result.passed and result.name not in allowed]
    if failed:
        what = "; ".join(f"gate {result.name!r} failed: {result.detail}" for result in failed)
        flags = " ".join(f'--allow "{result.name}"' for result in failed)
        raise GateError(f"{what}. To go on all the same: {flags}")
