"""The layout of vLLM speculators 0.9: `dflash`, `dflash2` and `dspark`, the trunk in `transformer_layer_config`.

Target layer ids are larger by one than ours. `sample_from_anchor` chooses the alignment: true is DSpark's (`block_size`
drafts), false DFlash's (`block_size` - 1 drafts). Source: the package speculators 0.9.0, models/{dflash,dflash2,dspark}.
"""

from __future__ import annotations

from typing import Any

from specgraft.drafters.config import FULL, SLIDING, DrafterConfig
from specgraft.drafters.convolution import TAPS
from specgraft.drafters.layouts.deepspec import head_fields
from specgraft.drafters.layouts.files import Fields
from specgraft.drafters.layouts.qwen3 import block_causal, shared_tensors, tap_ids, trunk_fields, trunk_json
from specgraft.log import say

TYPES = ("dflash", "dflash2", "dspark")
CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
VERSION = "0.9.0"


def claims(data: dict[str, Any]) -> bool:
    return "speculators_model_type" in data


def drafter_config(fields: Fields) -> DrafterConfig:
    """`target_layers` is 0: the layout does not say how many layers the target has."""
    kind = fields.word("speculators_model_type")
    if kind not in TYPES:
        raise fields.fault("speculators_model_type", f"={kind!r} is not supported, only {', '.join(TYPES)}")
    inner = fields.part("transformer_layer_config")
    trunk = trunk_fields(inner)
    fields.only("target_hidden_size", trunk["hidden_size"])
    if fields.integer("draft_vocab_size") != trunk["vocab_size"]:
        raise fields.fault("draft_vocab_size", f"={fields.integer('draft_vocab_size')}: a reduced vocabulary is not supported")
    from_anchor = fields.flag("sample_from_anchor")
    if from_anchor != (kind == "dspark") and kind != "dflash":
        raise fields.fault("sample_from_anchor", f"={str(from_anchor).lower()} is not supported for {kind}")
    causal = not fields.flag("sliding_window_non_causal")
    if SLIDING in trunk["layer_types"]:
        say(f"{fields.where}: speculators counts a window from the anchor, we and the engines from the slot: up to a block less context")
    more: dict[str, Any] = {}
    if kind == "dspark":
        more = head_fields(fields, fields.integer("markov_rank"))
    elif kind == "dflash2":
        if fields.integer("conv_kernel_size") != TAPS:
            raise fields.fault("conv_kernel_size", f"={fields.integer('conv_kernel_size')} is not supported, only {TAPS}")
        more = {
            "conv_group": fields.integer("conv_group_size"),
            "selector_rank": fields.integer("selector_rank"),
            "selector_top_k": fields.integer("selector_top_k"),
        }
    return DrafterConfig(
        kind="dspark" if from_anchor else kind,  # dflash that samples from the anchor is DSpark without heads
        draft_tokens=fields.integer("block_size") - (not from_anchor),
        taps=tap_ids(fields, "aux_hidden_state_layer_ids", 1, 0),
        target_layers=0,
        mask_token_id=fields.integer("mask_token_id"),
        block_causal=block_causal(trunk["layer_types"], False, causal, inner),
        **trunk,
        **more,
    )


def borrowed(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The verifier's tensors; older versions save some of them."""
    return {**shared_tensors(c), "verifier_lm_head.weight": (c.vocab_size, c.hidden_size), "verifier_norm.weight": (c.hidden_size,)}


def config_json(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Raises ValueError for a drafter that the layout has no form for. The verifier's name is left to be filled in."""
    if c.kind not in TYPES:
        raise ValueError(f"a {c.kind} drafter has no form in the speculators layout, only {', '.join(TYPES)} have")
    if c.block_causal and FULL in c.layer_types:
        raise ValueError("the speculators layout has causal blocks in sliding layers only: this drafter has no form in it")
    from_anchor = c.kind == "dspark"
    trunk = trunk_json(c, dtype)
    del trunk["dtype"], trunk["rope_theta"]  # it keeps the one outside and the other nested only
    found: dict[str, Any] = {
        "architectures": [CLASSES[c.kind]],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in c.taps],
        "block_size": c.draft_tokens + (not from_anchor),
        "draft_vocab_size": c.vocab_size,
        "dtype": dtype,
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": not c.block_causal,  # vLLM takes it for every layer
        "speculators_config": {
            "algorithm": c.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": c.draft_tokens, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": c.kind,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "transformer_layer_config": trunk,
    }
    if c.kind == "dspark":
        found |= {"markov_rank": c.markov_rank, "markov_head_type": c.markov_head, "enable_confidence_head": c.confidence}
        found["confidence_head_with_markov"] = c.confidence_with_markov and c.markov_rank > 0
    elif c.kind == "dflash2":
        found |= {"conv_kernel_size": TAPS, "conv_group_size": c.conv_group}
        found |= {"selector_rank": c.selector_rank, "selector_top_k": c.selector_top_k}
    return found
