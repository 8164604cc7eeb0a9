"""A drafter's shape on disk: nothing is a default, and every kind means the same number of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.decode.loop import Request, decode
from specgraft.decode.pair import pair
from specgraft.drafters.config import FULL, SLIDING, DrafterConfig
from specgraft.drafters.registry import KINDS, build
from specgraft.drafters.store import load_drafter, save_drafter

SHAPE: dict[str, Any] = {
    "draft_tokens": 7, "layers": 2, "hidden_size": 32, "vocab_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48,
    "eps": 1e-5, "rope_theta": 1e4, "max_positions": 256, "taps": (0, 2), "target_layers": 3, "mask_token_id": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mtp": {},
    "dflash": {"layer_types": (SLIDING, FULL), "sliding_window": 9, "block_causal": True},
    "dflash2": {"conv_group": 8, "selector_rank": 4, "selector_top_k": 6},
    "dspark": {"markov_rank": 4, "markov_head": "gated", "confidence": True, "confidence_detach": True, "options": {"of": ["yours", 1]}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stores_drafts_and_verifies_one_more(tiny_target, tmp_path: Path, kind: str) -> None:
    """faults.md D4: a dflash block of 8 inputs and a dspark block of 7 both mean 7 drafts and a verify width of 8."""
    torch.manual_seed(0)
    drafter = build(DrafterConfig(kind=kind, **SHAPE, **OWN[kind])).requires_grad_(False).eval()
    save_drafter(tmp_path, drafter)
    again = load_drafter(tmp_path)
    assert type(again) is type(drafter) and again.config == drafter.config
    assert json.loads((tmp_path / "config.json").read_text())["draft_tokens"] == 7
    target = tiny_target()
    forward, widths = target.forward, []

    def spied(ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(ids, *args, **more)

    target.forward = spied
    request = Request([5, 9, 12], 12)
    decode(pair(target, again), [request], 1)
    # the prompt is read packed, not by `forward`
    assert widths == [8] * len(request.rounds) and {verdict.proposed for verdict in request.rounds} == {7}


@pytest.mark.parametrize("name", DrafterConfig.__dataclass_fields__)
def test_a_field_that_is_missing_is_no_default(name: str) -> None:
    data = DrafterConfig(kind="dspark", **SHAPE, **OWN["dspark"]).to_json()
    assert DrafterConfig.from_json(data).to_json() == data == json.loads(json.dumps(data))
    del data[name]
    with pytest.raises(ValueError, match=f"fields {name} are missing or unknown"):
        DrafterConfig.from_json(data)


def test_what_makes_no_drafter_is_refused(tmp_path: Path) -> None:
    data = DrafterConfig(kind="dspark", **SHAPE, **OWN["dspark"]).to_json()
    with pytest.raises(ValueError, match="fields sample_from_anchor are missing or unknown"):
        DrafterConfig.from_json(data | {"sample_from_anchor": True})
    for more, why in (
        ({"layer_types": (FULL,)}, "for each of 2 layers"),
        ({"layer_types": (FULL, "linear")}, "name full_attention or sliding_attention"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window=0: .* longer than a block of 7 drafts"),
        ({"layer_types": (FULL, SLIDING), "sliding_window": 7}, "sliding_window=7"),
    ):
        with pytest.raises(ValueError, match=why):
            DrafterConfig(kind="dflash", **{**SHAPE, **more})
    with pytest.raises(ValueError, match=r"drafters\.markov_head='lstm': known are vanilla, gated, rnn"):
        build(DrafterConfig(kind="dspark", **SHAPE, **{**OWN["dspark"], "markov_head": "lstm"}))
    with pytest.raises(ValueError, match=r"drafters\.kind='eagle': known are mtp, dflash, dflash2, dspark"):
        build(DrafterConfig(kind="eagle", **SHAPE))
