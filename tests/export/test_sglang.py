"""The exported folder in SGLang's own class: every parameter filled, and the same block states. Needs no GPU.

SPECGRAFT_SGLANG names folders (separated as PATH is) that hold an unpacked `sglang` wheel and what it imports on a CPU:
msgspec orjson dill compressed-tensors loguru einops partial-json-parser openai httpx psutil.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import plain
from safetensors.torch import save_file

from specgraft.export.stage import export

FOLDERS = os.environ.get("SPECGRAFT_SGLANG", "")


@pytest.mark.engine
@pytest.mark.skipif(not FOLDERS, reason="SPECGRAFT_SGLANG is not set: no unpacked sglang wheel")
def test_sglangs_class_loads_it_all_and_computes_the_same(made, tmp_path):
    run = made()
    folder = export(run.config, run.run, run.checkpoint)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(20, 3, 64, generator=generator)
    anchor, mask = torch.randn(2, 64, generator=generator)
    states = torch.stack([anchor, *[mask] * 4])
    save_file({"taps": taps.flatten(1), "states": states}, tmp_path / "inputs.safetensors")
    script = Path(__file__).parent / "sglang_load.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tmp_path / "inputs.safetensors")],
        env={**os.environ, "PYTHONPATH": FOLDERS},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["unloaded"] == []
    assert found["gamma"] == 5 and found["sample_from_anchor"] is True
    reference = plain(folder)
    expected = reference.block(taps.double(), anchor.double(), mask.double())
    assert torch.allclose(torch.tensor(found["hidden"]).double(), expected, rtol=1e-4, atol=1e-4)
    assert found["confidence"] == pytest.approx(float(reference.confidence(expected[0], 5)), abs=1e-4)
