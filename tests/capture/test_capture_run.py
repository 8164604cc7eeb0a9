"""A run whose features are in fp8 and whose conversations are cut: captured, judged by its gates, trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgraft.run import Session
from specgraft.run_dir import read_json
from specgraft.run_file import load_config


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_a_run_with_cut_rows(make_run_file, tmp_path: Path, dtype: str) -> None:
    path = make_run_file(tmp_path)
    work = Session(load_config(path, [f"capture.dtype={dtype}", "train.steps=2", "train.validate_every=2"]))
    longest = max(len(conversation.input_ids) for conversation in work.regen())
    work = Session(load_config(path, [f"capture.dtype={dtype}", f"capture.max_length={longest - 3}", "train.steps=2", "train.validate_every=2"]))
    work.capture()
    manifest = read_json(work.run.features / "manifest.json")
    assert manifest["dtype"] == ("fp8" if dtype == "fp8" else "float32") and manifest["notes"]["cut"] >= 1
    assert max(row["tokens"] for shard in manifest["shards"] for row in shard["rows"]) == longest - 3
    gates = {gate.name: gate for gate in work.check()}
    assert all(gate.passed for gate in gates.values()), gates
    assert (gates["tap identity"].measured["cosine"] < 0.99999) == (dtype == "fp8")
    assert work.train().name == "step-000002"
