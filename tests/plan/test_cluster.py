"""`specgraft cluster --dry-run`: counts by hand, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specgraft.config import RunConfig
from specgraft.plan.cluster import layout


def config_of(folder: Path, **sections: dict[str, object]) -> RunConfig:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 100}))
    base = {"target": {"id": str(folder)}, "capture": {"taps": [1, 3]}}
    return RunConfig.model_validate({**base, **sections})


def test_bytes_of_a_token_a_step_and_a_second(tmp_path: Path) -> None:
    stream = {"medium": "ray", "producers": 3, "gpus": 2, "bound_mb": 60.5, "address": "10.0.0.1:6379"}
    config = config_of(tmp_path, stream=stream, train={"rows": 8, "max_length": 100})
    text = "\n".join(layout(config, ranks=4, speed=1000))
    assert "3 Ray actors on the cluster at 10.0.0.1:6379: 1 CPUs and 2 GPUs each, 6 GPUs in all" in text
    assert "4 ranks, 2 rows of a step each; loads of the target: embedding, head and final norm only" in text
    assert "a token    605 bytes" in text  # 3 states of 100 in two bytes, four of the id, one of the mask
    assert "about 100,000 tokens; 242.00 MB in all" in text
    assert "800 tokens at most, 484.00 kB" in text and "605.00 kB per second at 1,000 tokens per second" in text


def test_what_ranks_cannot_share_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--ranks 3: train\.rows=8 is no multiple"):
        list(layout(config_of(tmp_path), ranks=3))
    assert any("several ranks need stream.address" in line for line in layout(config_of(tmp_path, stream={"medium": "ray"}), ranks=2))
    with pytest.raises(ValueError, match="give --hidden"):
        list(layout(RunConfig.model_validate({"target": {"id": "some/hub-id"}})))


def test_the_embedded_target_needs_no_width() -> None:
    assert list(layout(RunConfig())) == list(layout(RunConfig(), hidden=576))


def test_a_target_behind_servers_is_not_loaded_here(tmp_path: Path) -> None:
    capture = {"taps": [1], "servers": ["http://10.0.0.1:8001"], "target": "outer"}
    text = "\n".join(layout(config_of(tmp_path, stream={"medium": "memory"}, capture=capture, drafters={"warm_layers": "none"}), ranks=2))
    assert "producers  http://10.0.0.1:8001" in text and "loads of the target: embedding, head and final norm only" in text
    assert "in the trainer's process" not in text
    assert any("one thread of each rank" in line for line in layout(config_of(tmp_path, stream={"medium": "memory"}), ranks=2))


def test_branches_bring_states_of_their_nodes_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, distill={"preset": "specopd"}, train={"rows": 2, "anchors": 5}, drafters={"draft_tokens": 4})
    assert any("30 nodes a step at most, 6.00 kB of states" in line for line in layout(config))


def test_the_command_loads_no_torch_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 100}))
    program = f"""
import sys
from specgraft import cli
sys.argv = ["specgraft", "cluster", "target.id={tmp_path}", "stream.medium=ray", "--dry-run"]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "ray", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 Ray actors" in done.stdout and "a step" in done.stdout
    refused = subprocess.run([sys.executable, "-m", "specgraft.cli", "cluster"], capture_output=True, text=True)
    assert refused.returncode == 2 and "add --dry-run" in refused.stderr
