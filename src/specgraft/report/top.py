"""`specgraft top`: what a training run says of itself, as a table that renews itself. Reads files; loads no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from specgraft.log import read_metrics
from specgraft.run_dir import RunDir, read_json
from specgraft.run_file import load_config

OVER = 20  # steps that a rate is a mean of


def run_of(path: Path) -> RunDir:
    """The run of a folder or of a run file. Raises ValueError where there is neither."""
    if path.is_dir():
        return RunDir(path)
    if not path.exists():
        raise ValueError(f"{path}: no folder of a run and no run file there; runs lie under run.root, such as runs/pilot")
    part = load_config(path).run
    return RunDir(Path(part.root).expanduser() / part.name)


def show(path: Path, once: bool, every: float, console: Console | None = None) -> None:
    """Prints the table, again and again until interrupted, or once."""
    run, console = run_of(path), console or Console()
    if once:
        console.print(table(run))
        return
    with Live(table(run), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(table(run), refresh=True)


def table(run: RunDir) -> Table:
    """The newest numbers of the run. Raises ValueError where it has not begun to train."""
    if not run.metrics.exists():
        raise ValueError(f"{run.metrics}: not there yet; start train, or name the folder of a run")
    rows = read_metrics(run.metrics)
    found = Table(title=str(run.root), show_header=False)
    found.add_column("what")
    found.add_column("value", justify="right")
    for name, value in lines(rows, read_json(run.config) if run.config.exists() else {}):
        found.add_row(name, value)
    return found


def lines(rows: list[dict[str, Any]], config: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the table."""
    steps = [row for row in rows if row.get("kind") == "train"]
    if not steps:
        return [("step", "none yet")]
    newest, recent = steps[-1], steps[-OVER:]
    seconds = sum(row["seconds"] + row.get("stall_seconds", 0.0) for row in recent)
    wanted = config.get("train", {}).get("steps")
    found = [
        ("step", f"{newest['step']}" + (f" of {wanted}" if wanted else "")),
        (f"loss, last {len(recent)} steps", f"{sum(row['loss'] for row in recent) / len(recent):.4f}"),
        ("gradient norm", f"{newest['grad_norm']:.4f}"),
        ("learning rate", f"{newest['lr']:.2e}"),
        ("seconds a step", f"{seconds / len(recent):.3f}"),
        ("tokens per second", f"{sum(row.get('tokens', 0) for row in recent) / max(seconds, 1e-9):,.0f}"),
        ("waiting for batches", f"{sum(row.get('stall_seconds', 0.0) for row in recent) / max(seconds, 1e-9):.1%}"),
    ]
    if active := [row["device_activity"] for row in recent if "device_activity" in row]:
        found.append(("device activity", f"{sum(active) / len(active):.1%}"))
    if wanted:
        found.append(("left", clock(seconds / len(recent) * (wanted - newest["step"]))))
    for name, key in (("memory (MB)", "rss_mb"), ("device memory (MB)", "device_mb"), ("staleness", "staleness")):
        if key in newest:
            found.append((name, f"{newest[key]:,.0f}"))
    if "queue_bytes" in newest:
        found.append(("features ahead (MB)", f"{newest['queue_bytes'] / 2**20:,.1f}"))
    for name, kind in (("teacher-forced accept length", "validate"), ("decoded accept length", "decode")):
        if own := [row for row in rows if row.get("kind") == kind]:
            found.append((name, f"{own[-1]['accept_length']:.3f} at step {own[-1]['step']}"))
            best = max(own, key=lambda row: row["accept_length"])
            if kind == "decode" and best is not own[-1]:
                found.append(("best decoded", f"{best['accept_length']:.3f} at step {best['step']}"))
    return found


def clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
