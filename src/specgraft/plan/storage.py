"""How many bytes captured features take on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ID_BYTES = 8  # input_ids are int64
MASK_BYTES = 1  # loss_mask is bool


@dataclass(frozen=True)
class Storage:
    """Bytes of the captured features of some tokens, without file headers (a few kB per shard)."""

    tokens: int
    taps: int  # K
    hidden: int  # D
    dtype: str
    state_bytes_per_token: int  # (K+1) * D * bytes: the taps and the last layer
    bytes_per_token: int  # and the id and the mask
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def storage(tokens: int, taps: int, hidden: int, dtype: str = "bfloat16") -> Storage:
    """tokens * ((K+1) * D * bytes + id + mask) (algorithms 2.1; `records.Features`).

    Raises ValueError for counts below 1 (taps may be 0) or an unknown dtype.
    """
    for name, value, least in (("tokens", tokens, 1), ("taps", taps, 0), ("hidden", hidden, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least} (given: {value})")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    states = (taps + 1) * hidden * DTYPE_BYTES[dtype]
    per_token = states + ID_BYTES + MASK_BYTES
    return Storage(tokens, taps, hidden, dtype, states, per_token, tokens * per_token)


def size_text(count: int) -> str:
    """12_345_678 -> "12.35 MB" (powers of 1000)."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.2f} {units[0]}"
