"""z-lab's flat layout: DFlash and DFlash2, `block_size` counting the anchor, what is special in `dflash_config`.

Sources: github z-lab/dflash, dflash/model.py (44947fb for DFlash, 1012959 for DFlash2); config.json of
z-lab/Qwen3-4B-DFlash-b16 and z-lab/Qwen3.8-27B-DFlash2. NeMo AutoModel 0.7 writes the same under `Qwen3` names.
"""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import FULL, DrafterConfig
from specgraft.drafters.convolution import TAPS
from specgraft.drafters.layouts.files import Fields
from specgraft.drafters.layouts.qwen3 import block_causal, shared_tensors, tap_ids, trunk_fields, trunk_json

KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlash2DraftModel": "dflash2",
}
SAME_MODEL = {  # keys of dflash_config that change the model at any other value
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "input_embedding_scale": (1, 1.0),
    "output_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "use_swa": (False,),
    "causal": (False,),
}
TRAINING = {"num_anchors", "loss_decay_gamma"}  # no part of the model
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
borrowed = shared_tensors


def claims(data: dict[str, Any]) -> bool:
    return any(name in KINDS for name in data.get("architectures") or ())


def drafter_config(fields: Fields) -> DrafterConfig:
    kind = next(KINDS[name] for name in fields.value("architectures") if name in KINDS)
    nested = fields.part("dflash_config")
    for name, allowed in SAME_MODEL.items():
        nested.only(name, *allowed)
    known = {*SAME_MODEL, *TRAINING, "block_size", "mask_token_id", "target_layer_ids", "num_target_layers"}
    if odd := set(nested.data) - known - (set(SELECTOR) if kind == "dflash2" else set()):
        raise nested.fault(min(odd), f" is not known for {kind}: another model, or a newer layout")
    trunk = trunk_fields(fields)
    layers = either(fields, nested, "num_target_layers").integer("num_target_layers")
    full = sliding = False
    if "is_causal" in fields or set(trunk["layer_types"]) != {FULL}:  # without sliding layers every reader takes no for an answer
        full = sliding = fields.flag("is_causal")
    more: dict[str, Any] = {}
    if kind == "dflash2":
        if nested.integer("conv_kernel_size") != TAPS:
            raise nested.fault("conv_kernel_size", f"={nested.integer('conv_kernel_size')} is not supported, only {TAPS}")
        more = {
            "conv_group": nested.integer("conv_group_size"),
            "selector_rank": nested.integer("selector_rank"),
            "selector_top_k": nested.integer("selector_top_k"),
        }
    return DrafterConfig(
        kind=kind,
        draft_tokens=either(fields, nested, "block_size").integer("block_size") - 1,
        taps=tap_ids(either(fields, nested, "target_layer_ids"), "target_layer_ids", 0, layers),
        target_layers=layers,
        mask_token_id=either(fields, nested, "mask_token_id").integer("mask_token_id"),
        block_causal=block_causal(trunk["layer_types"], full, sliding, fields),
        **trunk,
        **more,
    )


def either(fields: Fields, nested: Fields, name: str) -> Fields:
    """Where a key that may lie in `dflash_config` or beside it is; it may lie in both if they agree."""
    if name in fields and name in nested and fields.data[name] != nested.data[name]:
        raise fields.fault(name, f"={fields.data[name]!r} and {nested.prefix}{name}={nested.data[name]!r} disagree")
    return fields if name in fields else nested


def config_json(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Raises ValueError for a kind that the layout has no form for."""
    if c.kind not in ("dflash", "dflash2"):
        raise ValueError(f"a {c.kind} drafter has no form in the zlab layout, only dflash and dflash2 have")
    if not c.target_layers:
        raise ValueError("the zlab layout names the target's number of layers, and this drafter does not know it")
    nested: dict[str, Any] = {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.taps)}
    head = {"architectures": ["DFlashDraftModel"], "block_size": c.draft_tokens + 1}
    if c.kind == "dflash2":  # as published: DFlash2 keeps its block size with the rest
        head = {"architectures": ["DFlash2DraftModel"]}
        nested |= {"block_size": c.draft_tokens + 1, "conv_kernel_size": TAPS, "conv_group_size": c.conv_group}
        nested |= {"selector_rank": c.selector_rank, "selector_top_k": c.selector_top_k}
    return {
        **head,
        **trunk_json(c, dtype),
        "is_causal": c.block_causal,
        "num_target_layers": c.target_layers,
        "dflash_config": nested,
    }
