"""What export refuses for SGLang, given to SGLang all the same: it stops, drops tensors without a word, or computes something else.

The table of docs/export.md is this file's rows.
"""

from __future__ import annotations

import pytest
import torch
from sglang_cases import REFUSED, distance, ours, rounded

from specgraft.drafters.shared import Shared
from specgraft.export.facts import TargetFacts
from specgraft.export.refusals import refuse
from specgraft.export.reload import load_export
from specgraft.export.support import SGLANG, SGLANG_DSPARK, unsupported

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", REFUSED)
def test_what_sglang_does_with_what_we_refuse(sglang, name, capsys):
    row, found = REFUSED[name], sglang.answers[f"refused: {name}"]
    if row.said:
        assert row.said in found.get("error", "served"), found
        return
    assert "error" not in found, found["error"]
    assert found["unloaded"] == sorted(row.unloaded) and found["unused"] == sorted(row.unused)
    if row.unloaded or row.shape.get("kind") == "mtp":  # nothing to compare: no numbers, or another drafter's
        return
    given = dict(sglang.given[f"refused: {name}"])
    if "taps" in found:  # in the order of the drafter's layers, as trained
        caught, taps = torch.tensor(found["taps"]).chunk(3, -1), row.shape["taps"]
        given["taps"] = torch.cat([caught[sorted(taps).index(tap)] for tap in taps], -1)
    own = ours(rounded(sglang.drafters[f"refused: {name}"]), given)
    far = distance(found["hidden"], own["hidden"])
    with capsys.disabled():
        print(f"\n{name}: hidden {far:.1e}", end="")
    assert far <= 1e-5 if row.same else far > 1e-2


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_here(sglang, name):
    """By export, before anything is written, or by the reader of a folder that export never writes."""
    config = sglang.drafters[f"refused: {name}"].config
    facts = TargetFacts(layers=8, hidden_size=64, vocab_size=272, max_positions=4096)
    with pytest.raises(ValueError) as error:
        refuse(config, "bfloat16", "sglang", facts, 40 if name.startswith("reduced") else 0)
        load_export(sglang.folders[f"refused: {name}"])
    assert "\n" not in str(error.value)


HOOKS = {  # file of SGLang's models -> target kinds that it serves
    "qwen3": ["qwen3"], "qwen3_moe": ["qwen3_moe"], "qwen3_next": ["qwen3_next"], "qwen3_vl": ["qwen3_vl"], "deepseek_v4": ["deepseek_v4"],
    "qwen3_5": ["qwen3_5", "qwen3_5_moe"], "qwen3_5_text": ["qwen3_5_text", "qwen3_5_moe_text"], "llama": ["llama", "phi3", "internlm3"],
    "gpt_oss": ["gpt_oss"], "deepseek_v2": ["deepseek_v2", "deepseek_v3", "deepseek_v32"], "glm4_moe_lite": ["glm4_moe_lite"],
    "kimi_k25": ["kimi_k25"], "kimi_k3": ["kimi_k3"], "laguna": ["laguna"], "lfm2": ["lfm2"], "lfm2_moe": ["lfm2_moe"],
    "minicpmv": ["minicpmv"], "minimax_m3_vl": ["minimax_m3_vl"], "nemotron_h": ["nemotron_h"], "kimi_linear": ["kimi_linear"],
    "bailing_moe_v3": ["bailing_moe_v3"],
}  # fmt: skip
NO_HOOKS = {"qwen2": "qwen2", "mixtral": "mixtral", "gemma3_causal": "gemma3_text", "glm4_moe": "glm4_moe", "olmo2": "olmo2"}


def test_target_kinds_are_those_whose_classes_have_a_hook(sglang):
    """`set_dflash_layers_to_capture`, or the one that only the DSPARK worker asks; kinds without stop the server at its start."""
    models = sglang.wheel / "sglang" / "srt" / "models"
    assert set().union(*HOOKS.values()) == SGLANG | SGLANG_DSPARK
    for file, kinds in HOOKS.items():
        text = (models / f"{file}.py").read_text()
        for kind in kinds:
            hook = "set_dspark_layers_to_capture" if kind in SGLANG_DSPARK else "set_dflash_layers_to_capture"
            assert f"def {hook}(" in text, (file, kind)
            assert unsupported("sglang", "dspark", kind) == ""
    for file, kind in NO_HOOKS.items():
        assert "layers_to_capture(" not in (models / f"{file}.py").read_text().replace("set_eagle3_layers_to_capture(", ""), file
        assert "hands out no hidden states" in unsupported("sglang", "dspark", kind)


def test_float32_would_be_served_as_float16(sglang):
    assert sglang.answers["settings: as exported"] == {"dtype": "bfloat16", "context": 4096}
    assert sglang.answers["settings: float32"]["dtype"] == "float16"


def test_a_context_shorter_than_the_targets_stops_the_server(sglang):
    assert "context_length (8192) is greater than the derived context_length (4096)" in sglang.answers["settings: longer target"]["error"]


def test_without_a_confidence_head_only_its_schedules_are_closed(sglang):
    """Not refused: the default mode builds no such head (see the form without one); the others stop and name what is missing."""
    assert "checkpoint is missing ['confidence_head.proj.bias'" in sglang.answers["no confidence, scheduled"]["error"]


def test_gemma_4_embeddings_are_other_ones(sglang):
    """SGLang's targets of this kind scale what they embed; drafters here read the rows as stored."""
    rows = sglang.given["gemma"]["embedding"]
    theirs = torch.tensor(sglang.answers["gemma"]["rows"])
    own = Shared(rows, rows, torch.nn.Identity(), 0).embed(torch.arange(len(rows)))
    assert torch.allclose(theirs, own * 8) and torch.equal(own, rows)
    assert "multiplies" in unsupported("sglang", "dspark", "gemma4_text")
