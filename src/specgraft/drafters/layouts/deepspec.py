"""DeepSpec's layout: DSpark, and what DeepSpec calls DFlash, which is DSpark without a sequential head.

`block_size` counts drafts and slot j-1 proposes draft j. Source: github deepseek-ai/DeepSpec afdfa7c,
deepspec/modeling/dspark/qwen3/{config,modeling}.py, dspark/markov_head.py, dspark/common.py.
"""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import FULL, DrafterConfig
from specgraft.drafters.layouts.files import Fields
from specgraft.drafters.layouts.qwen3 import shared_tensors, tap_ids, trunk_fields, trunk_json

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
HEADS = ("vanilla", "gated", "rnn")
ANCHORS = 512  # a setting of its trainer that its loader asks for; all of its configs have this
MIRRORED = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank", "markov_head_type")
borrowed = shared_tensors


def claims(data: dict[str, Any]) -> bool:
    return any(name in ARCHITECTURES for name in data.get("architectures") or ())


def drafter_config(fields: Fields) -> DrafterConfig:
    fields.only("sample_from_anchor", True)  # DeepSpec knows nothing else; some exports say so
    fields.only("is_causal", False)
    trunk = trunk_fields(fields)
    if set(trunk["layer_types"]) != {FULL}:
        raise fields.fault("layer_types", f" must all be {FULL} in this layout")
    if "dflash_config" in fields:
        agree(fields, fields.part("dflash_config"))
    layers, rank = fields.integer("num_target_layers"), fields.integer("markov_rank")
    return DrafterConfig(
        kind="dspark",
        draft_tokens=fields.integer("block_size"),
        taps=tap_ids(fields, "target_layer_ids", 0, layers),
        target_layers=layers,
        mask_token_id=fields.integer("mask_token_id"),
        **trunk,
        **head_fields(fields, rank),
    )


def head_fields(fields: Fields, rank: int) -> dict[str, Any]:
    """The sequential and the confidence head; of one that is not there nothing is asked."""
    confidence = fields.flag("enable_confidence_head")
    found: dict[str, Any] = {"markov_rank": rank, "confidence": confidence}
    if rank:
        found["markov_head"] = fields.word("markov_head_type")
        fields.only("markov_head_type", *HEADS)
    if confidence:
        found["confidence_with_markov"] = fields.flag("confidence_head_with_markov")
    return found


def agree(fields: Fields, nested: Fields) -> None:
    """A copy of the keys in `dflash_config`, as exports for SGLang carry it, must say the same."""
    nested.only("projector_type", "dspark")
    for name in MIRRORED:
        if name in nested and fields.value(name) != nested.data[name]:
            raise nested.fault(name, f"={nested.data[name]!r} and {name}={fields.data[name]!r} disagree")
    if odd := set(nested.data) - {"projector_type", *MIRRORED}:
        raise nested.fault(min(odd), " is not known in this layout")


def config_json(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Raises ValueError for a drafter that the layout has no form for."""
    if c.kind != "dspark":
        raise ValueError(f"a {c.kind} drafter has no form in the deepspec layout, only dspark has")
    if c.block_causal or set(c.layer_types) != {FULL}:
        raise ValueError("the deepspec layout has no sliding layers and no causal blocks: this drafter has no form in it")
    if not c.target_layers:
        raise ValueError("the deepspec layout names the target's number of layers, and this drafter does not know it")
    found = {
        "architectures": [ARCHITECTURES[0]],
        **trunk_json(c, dtype),
        "block_size": c.draft_tokens,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.taps),
        "num_target_layers": c.target_layers,
        "num_anchors": ANCHORS,
        "enable_confidence_head": c.confidence,
        "markov_rank": c.markov_rank,
    }
    if c.confidence:
        found["confidence_head_with_markov"] = c.confidence_with_markov and c.markov_rank > 0
    if c.markov_rank:
        found["markov_head_type"] = c.markov_head
    return found
