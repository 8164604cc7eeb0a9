"""How many bytes captured features take on disk, the names in their headers included."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specgraft.config import RunConfig
from specgraft.records import read_conversations
from specgraft.run_dir import RunDir, read_json

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
SCALE_BYTES = 4  # fp8: a float32 per state
ID_BYTES = 4  # input_ids are stored as int32
MASK_BYTES = 1  # loss_mask is bool
ROW_BYTES = 250  # id, length and digest of a conversation, in its shard and in the manifest
SHARD_BYTES = 2_500  # header and tensor table of a shard, its entry in the manifest
ROW_TOKENS = 400  # of a conversation, where nobody says how many there are
SHARD_TOKENS = 65_536  # default of capture.shard_tokens
EMBEDDED = {"smollm2": 576}  # hidden sizes of targets that packages bring: their folders need not be there yet


@dataclass(frozen=True)
class Storage:
    """Bytes of the captured features of some tokens."""

    tokens: int
    taps: int  # K
    hidden: int  # D
    dtype: str
    state_bytes_per_token: int  # (K+1) * D * bytes: the taps and the last layer; fp8: and their scales
    bytes_per_token: int  # and the id and the mask
    conversations: int
    header_bytes: int  # of shards and manifest
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def storage(
    tokens: int,
    taps: int,
    hidden: int,
    dtype: str = "bfloat16",
    conversations: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    streams: int = 1,
) -> Storage:
    """tokens * ((K+1) * D * bytes + id + mask) + headers (algorithms 2.1; `records.Features`).

    `conversations` 0: as many as there are stretches of 400 tokens. `streams`: residual streams of the last layer
    (hyper-connections). Raises ValueError for counts below 1 (taps may be 0) or an unknown dtype.
    """
    counts = (("tokens", tokens, 1), ("taps", taps, 0), ("hidden", hidden, 1), ("conversations", conversations, 0))
    for name, value, least in (*counts, ("shard tokens", shard_tokens, 1), ("streams", streams, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least} (given: {value})")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    states = (taps + streams) * hidden * DTYPE_BYTES[dtype] + ((taps + 1) * SCALE_BYTES if dtype == "fp8" else 0)
    per_token = states + ID_BYTES + MASK_BYTES
    rows = conversations or -(-tokens // ROW_TOKENS)
    headers = rows * ROW_BYTES + -(-tokens // shard_tokens) * SHARD_BYTES
    return Storage(tokens, taps, hidden, dtype, states, per_token, rows, headers, tokens * per_token + headers)


def of_config(config: RunConfig, width: tuple[int, int], tokens: int, conversations: int, dtype: str = "") -> Storage:
    """What a run file keeps of so many tokens, or, with a `dtype` of its own, what travels of them. `width`: see `widths`."""
    part = config.capture
    taps = len(part.taps) if isinstance(part.taps, list) else part.tap_count
    kept = dtype or ("fp8" if part.dtype == "fp8" else config.target.dtype)
    return storage(tokens, taps, width[0], kept, conversations, part.shard_tokens, width[1])


def of_run(folder: Path, hidden: int = 0) -> Storage:
    """What the answers of a run folder will weigh, by its own settings; a row longer than capture.max_length counts that much.

    `hidden` 0: read from the target's config.json. Raises ValueError where there are no answers, or no such file.
    """
    run = RunDir(folder)
    config = read_json(run.config)
    target, part = config.get("target", {}), config.get("capture", {})
    rows = read_conversations(run.regen)
    if not rows:
        raise ValueError(f"{run.regen}: holds no answers; run regen first, or give --tokens")
    hidden, streams = widths(str(target.get("id")), hidden)
    limit = part.get("max_length") or max(len(row.input_ids) for row in rows)
    taps = part.get("taps", "spread")
    return storage(
        sum(min(len(row.input_ids), limit) for row in rows),
        len(taps) if isinstance(taps, list) else part.get("tap_count", 5),
        hidden,
        "fp8" if part.get("dtype") == "fp8" else target.get("dtype", "bfloat16"),
        len(rows),
        part.get("shard_tokens", SHARD_TOKENS),
        streams,
    )


def widths(target: str, hidden: int = 0) -> tuple[int, int]:
    """Hidden size and residual streams of a target, from its config.json; `hidden` > 0 is taken as it is. Raises ValueError where
    there is no such file."""
    if hidden := hidden or EMBEDDED.get(target, 0):
        return hidden, 1
    shape = Path(target).expanduser() / "config.json"
    if not shape.is_file():
        raise ValueError(f"target.id={target!r} is no folder here: give --hidden")
    known = read_json(shape)
    known = known.get("text_config", known)
    return known["hidden_size"], known.get("hc_count") or 1


def size_text(count: int) -> str:
    """12_345_678 -> "12.35 MB" (powers of 1000)."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
