"""Padding of batches counted by hand, and the comparison of features in fp8 on hand-made rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgraft.records import Conversation, ids_digest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import fp8
    import padding

    return padding, fp8


def test_waste_is_padding_over_places(scripts: Any) -> None:
    padding, _ = scripts
    lengths = [10, 2, 10, 2, 9, 3]
    # 20 places a pass: [10, 2], [10, 2], [9, 3]; within shards of 24 tokens: [10, 10], [2, 2], [9, 3]; whole: [10, 10], [9], [3], [2, 2]
    assert padding.waste(lengths, 20, 24, "none") == {"passes": 3, "padded": 58, "waste": 1 - 36 / 58}
    assert padding.waste(lengths, 20, 24, "shard") == {"passes": 3, "padded": 42, "waste": 1 - 36 / 42}
    assert padding.waste(lengths, 20, 24, "window") == {"passes": 4, "padded": 36, "waste": 0.0}


def test_padding_of_a_regen_folder(tmp_path: Path) -> None:
    rows = [
        Conversation(str(n), "f", "en", "chat", "train" if n else "heldout", list(range(n + 4)), [False] * 2 + [True] * (n + 2), 2, 0.0, 1.0, 0, "length", ids_digest([n]))
        for n in range(12)
    ]  # fmt: skip
    (tmp_path / "train-00000.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "padding.py"), str(tmp_path), "--max-length", "12", "--json", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["sets"].values()
    assert (row["rows"], row["tokens"]) == (12, sum(min(n + 4, 12) for n in range(12)))
    assert row["window"]["waste"] <= 0.05 < row["none"]["waste"] and "| 4, 10, 12 |" in done.stdout


def test_fp8_is_compared_prompt_by_prompt(scripts: Any) -> None:
    _, fp8 = scripts

    def row(*lengths: float | None) -> dict[str, Any]:
        return {key: {"per_request": list(lengths)} for key in ("t0", "t1", "expected")}

    found = {
        "target": {"bytes": 2_000_000, "rows": [row(2.0, 4.0, None), row(2.0, 4.0, 3.0)]},
        "fp8": {"bytes": 1_030_000, "rows": [row(1.9, 3.9, 3.0), row(1.9, 3.9, 3.0)], "round_trip_error": {"taps": {"mean": 0.026}}},
    }
    text = fp8.table(found, "bfloat16")
    assert "| bfloat16 | 2.00 MB | 100.00% | 3.0000 |" in text  # a prompt without a round counts nowhere
    assert "| fp8 | 1.03 MB | 51.50% | 2.9000 (-3.33 %, -3.33 to -3.33) |" in text and "0.026" in text
