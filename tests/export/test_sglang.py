"""Exported folders in SGLang's own classes: every parameter filled, and the forward ours. Needs no GPU, runs on a CPU.

`make engines ENGINES=sglang-loader` fetches what it takes: the pinned `sglang` wheel, unpacked, and what its draft models import.
SPECGRAFT_SGLANG names other folders (separated as PATH is).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import plain
from sglang_ask import Answers, taps_of
from sglang_cases import CHAINS, CONTEXT, FORMS, distance, ours, rounded
from transformers import AutoModelForCausalLM

from specgraft.targets.attention import NAME
from specgraft.targets.model import Target

pytestmark = pytest.mark.engine
CLOSE = 1e-5  # of the largest value, float32 on both sides


def compared(sglang: Answers, name: str, own: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    found = sglang.answers[name]
    assert "error" not in found, found["error"]
    assert found["unloaded"] == [] and set(found["unused"]) <= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    far = {part: distance(found[part], own[part]) for part in ("hidden", "logits", "confidence") if part in own}
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{part} {value:.1e}" for part, value in far.items()), end="")
    assert found["tokens"] == own["tokens"].tolist()
    assert all(value <= CLOSE for value in far.values()), far


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_loaded_whole_and_computes_the_same(sglang, name, capsys):
    drafter = rounded(sglang.drafters[f"form: {name}"])
    found = sglang.answers[f"form: {name}"]
    assert "error" not in found, found["error"]
    assert found["drafts"] == drafter.config.draft_tokens and found["unused"] == []
    assert ("confidence" in found) == (drafter.confidence_head is not None)
    compared(sglang, f"form: {name}", ours(drafter, sglang.given[f"form: {name}"]), capsys)


def test_against_the_contract_in_plain_sums(sglang):
    """The reference that shares no code with either, in float64."""
    name = "form: dspark"
    given, found, reference = sglang.given[name], sglang.answers[name], plain(sglang.folders[name])
    embedding = given["embedding"].double()
    expected = reference.block(given["taps"].view(CONTEXT, 3, 64).double(), embedding[7], embedding[265])
    assert distance(found["hidden"], expected.float()) <= CLOSE
    base = expected @ given["head"].double().T
    before = [7, *found["tokens"][:-1]]
    logits = torch.stack([base[slot] + reference.bias(token) for slot, token in enumerate(before)])
    assert distance(found["logits"], logits.float()) <= CLOSE
    confidence = torch.stack([reference.confidence(expected[slot], token) for slot, token in enumerate(before)])
    assert distance(found["confidence"], confidence.float()) <= CLOSE


@pytest.mark.parametrize("target", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", CHAINS)
def test_behind_a_targets_own_states(sglang, kind, target, capsys):
    """SGLang's target class hands over the layers that our capture stores, and the drafter proposes the same behind them."""
    name = f"chain: {kind}, {target}"
    folder: Path = sglang.targets[target]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    own = Target(model, SimpleNamespace(eos_token_id=1, chat_template="stub"), folder, torch.device("cpu"))
    given = dict(sglang.given[name])
    every = own.forward(given["ids"][None], own.cache(1, CONTEXT), range(7)).taps
    assert every is not None
    theirs, taps = taps_of(sglang, name).tolist(), every[:, :, [1, 3, 5]]
    far, shifted = (distance(theirs, states[0].flatten(1)) for states in (taps, every[:, :, [2, 4, 6]]))
    with capsys.disabled():
        print(f"\n{name}: target states {far:.1e}, of the layers above {shifted:.1e}", end="")
    assert far <= CLOSE and shifted > 0.1
    given["taps"] = taps[0].flatten(1).clone()
    compared(sglang, name, ours(rounded(sglang.drafters[name]), given), capsys)
