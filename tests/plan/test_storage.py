"""Bytes of captured features."""

from __future__ import annotations

import pytest

from specgraft.plan.storage import size_text, storage


def test_published_cost_per_token() -> None:
    need = storage(tokens=1, taps=5, hidden=2560)  # Qwen3-4B, five taps: 30,720 B (algorithms 2.1)
    assert need.state_bytes_per_token == 30_720
    assert need.bytes_per_token == 30_725
    small = storage(tokens=1, taps=5, hidden=2560, dtype="fp8")
    assert small.state_bytes_per_token == 15_384 and small.bytes_per_token == 15_389


def test_by_hand() -> None:
    need = storage(tokens=1000, taps=2, hidden=10, dtype="float32")
    assert need.header_bytes == 3 * 250 + 2_500  # three conversations of 400 tokens, one shard
    assert need.bytes == 1000 * (3 * 10 * 4 + 5) + need.header_bytes
    assert storage(1000, 2, 10, "float32", conversations=7, shard_tokens=400).header_bytes == 7 * 250 + 3 * 2_500
    assert storage(1000, 2, 10, "float32", streams=4).state_bytes_per_token == 6 * 10 * 4
    assert need.to_json()["bytes"] == need.bytes


def test_size_text() -> None:
    assert [size_text(n) for n in (999, 12_345, 30_729_000_000)] == ["999 B", "12.35 kB", "30.73 GB"]


@pytest.mark.parametrize(
    ("tokens", "taps", "hidden", "dtype", "line"),
    [
        (0, 5, 8, "bfloat16", "tokens must be at least 1 (given: 0)"),
        (1, -1, 8, "bfloat16", "taps must be at least 0 (given: -1)"),
        (1, 5, 0, "bfloat16", "hidden must be at least 1 (given: 0)"),
        (1, 5, 8, "int8", "unknown dtype 'int8'; known: float32, bfloat16, float16, fp8"),
    ],
)
def test_bad_numbers(tokens: int, taps: int, hidden: int, dtype: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        storage(tokens, taps, hidden, dtype)
    assert str(caught.value) == line
