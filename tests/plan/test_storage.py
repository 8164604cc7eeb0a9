"""Bytes of captured features."""

from __future__ import annotations

import pytest

from specgraft.plan.storage import size_text, storage


def test_published_cost_per_token() -> None:
    need = storage(tokens=1, taps=5, hidden=2560)  # Qwen3-4B, five taps: 30,720 B (algorithms 2.1)
    assert need.state_bytes_per_token == 30_720
    assert need.bytes_per_token == 30_729


def test_by_hand() -> None:
    need = storage(tokens=1000, taps=2, hidden=10, dtype="float32")
    assert need.bytes == 1000 * (3 * 10 * 4 + 9)
    assert need.to_json()["bytes"] == need.bytes


def test_size_text() -> None:
    assert [size_text(n) for n in (999, 12_345, 30_729_000_000)] == ["999 B", "12.35 kB", "30.73 GB"]


@pytest.mark.parametrize(
    ("tokens", "taps", "hidden", "dtype", "line"),
    [
        (0, 5, 8, "bfloat16", "tokens must be at least 1 (given: 0)"),
        (1, -1, 8, "bfloat16", "taps must be at least 0 (given: -1)"),
        (1, 5, 0, "bfloat16", "hidden must be at least 1 (given: 0)"),
        (1, 5, 8, "int8", "unknown dtype 'int8'; known: float32, bfloat16, float16"),
    ],
)
def test_bad_numbers(tokens: int, taps: int, hidden: int, dtype: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        storage(tokens, taps, hidden, dtype)
    assert str(caught.value) == line
