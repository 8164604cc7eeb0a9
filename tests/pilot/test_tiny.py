"""`pilot --tiny`: the recipe's graph on a random target of 48 layers, the last one tapped before the final norm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from specgraft.capture.forward import capture_batch
from specgraft.check.tap_identity import tap_identity
from specgraft.config import RunConfig
from specgraft.pilot.stage import pilot
from specgraft.pilot.tiny import LAYERS, tiny
from specgraft.records import Conversation, Features
from specgraft.run import Session
from specgraft.run_file import load_config
from specgraft.targets.load import load_target

pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no kimi_linear")

RECIPE = Path(__file__).parents[2] / "recipes" / "solar_open2.toml"
TAPS = [3, 15, 27, 39, 47]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny(load_config(RECIPE, [f"run.root={tmp_path_factory.mktemp('tiny')}", "run.threads=1"]))


def row(name: str, ids: list[int]) -> Conversation:
    return Conversation(name, "f", "en", "chat", "train", ids, [False] * 4 + [True] * (len(ids) - 4), 4, 0.0, 1.0, 0, "length", "")


def test_what_the_run_file_says_stays_and_what_is_too_large_goes(small: RunConfig) -> None:
    whole = load_config(RECIPE)
    assert small.capture.taps == whole.capture.taps == TAPS and small.stream.medium == whole.stream.medium == "memory"
    assert small.drafters.kind == "dspark" and small.drafters.draft_tokens == 7 and small.distill == whole.distill
    assert small.capture.servers == small.regen.servers == [] and small.capture.target == "whole"
    folder = Path(small.target.id)
    assert folder.parent == Path(small.run.root) / "solar_open2-tiny" and (folder / "model.safetensors").is_file()
    shape = json.loads((folder / "config.json").read_text())
    assert shape["num_hidden_layers"] == LAYERS == 48
    assert [place for place, kind in enumerate(shape["layer_types"]) if kind == "full_attention"] == list(range(0, 48, 4))


def test_taps_that_the_tiny_target_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers 0 to 47 and capture\.taps names 48"):
        tiny(load_config(RECIPE, [f"run.root={tmp_path}", "capture.taps=[3, 48]"]))


def test_a_pilot_without_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="the pilot decodes with the whole target; add --tiny"):
        pilot(Session(load_config(RECIPE)))


def test_the_gate_holds_the_last_layer_before_the_final_norm(small: RunConfig) -> None:
    target = load_target(small.target.id, "float32", "cpu")
    rows = [row("a", list(range(9))), row("b", list(range(100, 120)))]
    made = dict(zip("ab", capture_batch(target, rows, TAPS), strict=True))
    assert torch.equal(made["a"].taps[:, TAPS.index(47)], made["a"].last)
    assert tap_identity(target, lambda c: made[c.prompt_id], rows, TAPS).passed

    def normed(conversation: Conversation) -> Features:
        taps = made[conversation.prompt_id].taps.clone()
        with torch.no_grad():
            taps[:, -1] = target.final_norm(taps[:, -1])
        return dataclasses.replace(made[conversation.prompt_id], taps=taps)

    found = tap_identity(target, normed, rows, TAPS)
    assert not found.passed and "tap 47" in found.detail and "its own layer with the final norm applied" in found.detail


def test_the_whole_graph_runs_and_every_gate_holds(small: RunConfig) -> None:
    """Answers, features made while training, training, decoding, export, report: half a minute on a quiet core."""
    threads = torch.get_num_threads()
    sizes = {
        "prompts": {"train": 5, "held_out": 2, "domains": {"chat": 1.0}}, "regen": {"greedy_share": 1.0, "max_new_tokens": 17},
        "train": {"steps": 2, "rows": 2}, "evaluate": {"prompts": 2, "sampled_prompts": 0, "speed_prompts": 0, "examples": 0, "max_new_tokens": 8},
    }  # fmt: skip
    values = small.model_dump()
    for section, part in sizes.items():
        values[section] |= part
    work = Session(RunConfig.model_validate(values))
    try:
        summary = pilot(work)
    finally:
        torch.set_num_threads(threads)
    assert set(summary["gates"]) == {"token identity", "tap identity", "distribution identity", "overfit", "agreement", "lossless", "export"}
    assert all(summary["gates"].values()) and summary["lossless_mismatches"] == 0
    assert work.run.export.is_dir() and work.run.report.is_file() and not work.run.features.exists()
