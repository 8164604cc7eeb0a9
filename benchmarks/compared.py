"""What the benchmarks that compare drafters share: a run folder that borrows another's data, and what is measured of a drafter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from specgraft.config import RunConfig
from specgraft.decode.loop import Request
from specgraft.decode.pair import Pair
from specgraft.evaluate import metrics
from specgraft.evaluate.stage import decoded
from specgraft.records import Conversation, ids_digest
from specgraft.run import Session
from specgraft.run_dir import RunDir
from specgraft.stream.shards import ShardReader


def borrowed(base: Session, *path: str) -> RunDir:
    """A run folder inside the base run that shares its answers and features."""
    root = base.run.root.joinpath(*path)
    root.mkdir(parents=True, exist_ok=True)
    for name in ("regen", "features"):
        if not (root / name).exists():
            (root / name).symlink_to(getattr(base.run, name).resolve())
    return RunDir(root)


def features(session: Session, split: str = "train") -> ShardReader:
    """The captured answers of this run."""
    keep = {c.prompt_id: ids_digest(c.input_ids) for c in session.conversations() if c.split == split}
    return ShardReader(session.run.features, split, session.header, keep=keep)


def prepare(session: Session) -> None:
    """Answers and features, made where they are missing; the gates of capture, which take longer than a comparison, are
    not run again on what is there."""
    try:
        wanted = session.conversations()
        if sum(len(features(session, split)) for split in ("train", "heldout")) == len(wanted):
            return
    except ValueError:
        pass  # not there yet, or not whole
    session.regen()
    session.capture()


def accepted(both: Pair, texts: Sequence[Conversation], config: RunConfig) -> tuple[dict[str, Any], list[Request]]:
    """Accept length of the decode loop, "t0" and "t1", and the requests of the latter."""
    found, requests = {}, list[Request]()
    for name, temperature, count in (("t0", 0.0, config.evaluate.prompts), ("t1", 1.0, config.evaluate.sampled_prompts)):
        requests = decoded(both, texts[:count], config, temperature)
        rounds = [request.rounds for request in requests]
        found[name] = {
            "accept_length": metrics.accept_length(rounds),
            "accept_length_pooled": metrics.accept_length_pooled(rounds),
            "survival": metrics.survival([v for mine in rounds for v in mine], both.drafter.config.draft_tokens),
            "per_request": [metrics.accept_length([mine]) for mine in rounds],
        }
    return found, requests


def run(parser: argparse.ArgumentParser, compare: Callable[[argparse.Namespace], None]) -> None:
    """Parses and compares; what a user can mend is one line and exit code 2."""
    args = parser.parse_args()
    try:
        compare(args)
    except ValueError as error:
        parser.error(str(error))
