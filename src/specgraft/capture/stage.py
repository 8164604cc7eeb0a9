"""`capture`: Conversations -> Features on disk. Shards that are there are kept; only what is missing is computed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from specgraft.capture.batches import by_length, into_shards
from specgraft.capture.forward import capture_batch, fault_of, resolve_taps
from specgraft.config import RunConfig
from specgraft.log import progress, say
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run_dir import RunDir
from specgraft.stream.shards import ShardWriter, refuse_other_ids
from specgraft.targets.load import identity
from specgraft.targets.model import Target

FAULT_RATE = 0.01  # more rows than this with broken states stop the run


def feature_header(config: RunConfig, target: Target) -> dict[str, Any]:
    """The manifest fields that every reader compares."""
    taps = resolve_taps(config.capture.taps, config.capture.tap_count, target.num_layers)
    return {"target": identity(target), "taps": taps, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}


def feature_bytes(tokens: int, taps: int, hidden: int, width: int) -> int:
    """Bytes of features: states, int32 ids and one byte of mask per token."""
    return tokens * ((taps + 1) * hidden * width + 5)


def capture(config: RunConfig, run: RunDir, target: Target, conversations: Sequence[Conversation]) -> None:
    """Writes Features of every conversation that has none yet.

    Raises ValueError when the disk is too small, more than 1 % of the rows have broken states, or what is there was captured
    from other answers.
    """
    header = feature_header(config, target)
    writer = ShardWriter(run.features, header)
    have = writer.digests
    wanted = {c.prompt_id: ids_digest(c.input_ids) for c in conversations}
    for prompt_id, value in have.items():
        refuse_other_ids(run.features, prompt_id, value, wanted)
    missing = [c for c in conversations if c.prompt_id not in have]
    if not missing:
        return
    total = sum(len(c.input_ids) for c in missing)
    need = feature_bytes(total, len(header["taps"]), target.hidden_size, target.head.weight.element_size())
    free = shutil.disk_usage(run.features).free
    if need > free:
        raise ValueError(f"{run.features}: needs {need / 1e6:,.3f} MB, {free / 1e6:,.3f} MB are free; free space or set run.root")
    skipped: dict[str, int] = {}
    done = 0
    with progress("capture", total) as bar:
        for split in ("train", "heldout"):
            mine = [c for c in missing if c.split == split]
            for shard in into_shards([len(c.input_ids) for c in mine], config.capture.shard_tokens):
                part = [mine[index] for index in shard]
                rows: dict[int, Features] = {}
                for batch in by_length([len(c.input_ids) for c in part], config.capture.batch_tokens):
                    features = capture_batch(target, [part[index] for index in batch], header["taps"])
                    for index, row in zip(batch, features, strict=True):
                        if fault := fault_of(row):
                            skipped[fault] = skipped.get(fault, 0) + 1
                        else:
                            rows[index] = row
                    done += sum(len(part[index].input_ids) for index in batch)
                    bar.at(done, f"{need * done / total / 1e9:.2f} GB")
                broken = sum(skipped.values())
                if broken > FAULT_RATE * len(conversations):
                    raise ValueError(
                        f"capture: {broken} of {len(conversations)} conversations have broken states "
                        f"({', '.join(f'{n} x {why}' for why, n in skipped.items())}): check the target's weights and dtype"
                    )
                if rows:
                    kept = sorted(rows)
                    writer.add(split, [rows[i] for i in kept], [wanted[part[i].prompt_id] for i in kept])
    if skipped:
        say(f"capture: left out {skipped}")
