"""Features for training without a capture before it: this process, servers or actors make them while the trainer asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specgraft.capture.cuts import shortened
from specgraft.capture.forward import capture_batch, fault_of
from specgraft.capture.stage import feature_bytes, producer, refuse_empty_splits, refuse_pictures
from specgraft.config import RunConfig
from specgraft.log import say
from specgraft.records import Conversation
from specgraft.run_dir import RunDir
from specgraft.stream.live import Counts, Make, in_a_thread
from specgraft.stream.open import open_source
from specgraft.stream.parcels import Failed, Parcel, parcel
from specgraft.stream.source import Open, Source
from specgraft.targets.model import Target


def opened(
    config: RunConfig, run: RunDir, target: Any, header: dict[str, Any], conversations: Sequence[Conversation],
    remote: Callable[[Counts], Make] | None = None,
) -> Open:  # fmt: skip
    """What training opens its splits with. `remote`: actors that make the rows; None: this process, or the servers that it asks.

    Raises ValueError when a split has no row left, or a row holds a picture.
    """
    refuse_pictures(conversations, target)
    rows, left_out = shortened(conversations, header["max_length"])
    refuse_empty_splits(conversations, rows, left_out, header["max_length"])
    if left_out:
        say(f"stream: {len(left_out)} of {len(conversations)} rows left out, nothing can be learnt from them")

    def found(split: str, keep: Mapping[str, str]) -> Source:
        counts = Counts()
        make = remote(counts) if remote is not None else local(config, target, header, counts)
        return open_source(config, run, header, rows, split, keep, make, counts)

    return found


def local(config: RunConfig, target: Target, header: dict[str, Any], counts: Counts) -> Make:
    """Rows made by the target in this process, or by servers: half of the bound is for what these have ahead."""
    bound = config.stream.bound_mb * 1e6 / (2 if config.capture.servers else 1)
    make = producer(config, target, header, bound)
    return in_a_thread(make, header["dtype"] == "fp8", fault_of, bound, counts)


def row_bytes(header: Mapping[str, Any], streams: int) -> Callable[[Conversation], int]:
    """Bytes that a row's features will have."""
    width = 1 if header["dtype"] == "fp8" else getattr(torch, header["dtype"]).itemsize
    return lambda row: feature_bytes(len(row.input_ids), len(header["taps"]), header["hidden_size"], width, streams)


def produce(target: Target, rows: Sequence[Conversation], taps: Sequence[int], coded: bool) -> list[Parcel | Failed]:
    """One forward pass: what an actor is asked for."""
    return [parcel(row, coded, fault_of) for row in capture_batch(target, rows, taps)]
