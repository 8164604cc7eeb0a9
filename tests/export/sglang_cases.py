"""Which folders SGLang is asked about: every form that we export for it, and what we refuse, written all the same.

Legend: T context tokens, K taps, D hidden size, V vocabulary, G drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import Corrector, base_logits, walk
from specgraft.export.contract import config_json
from specgraft.export.vocabulary import DraftVocabulary, pruned
from specgraft.ops.sampling import Law

CONTEXT = 40  # longer than the windows below
Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]

DFLASH: Json = {"kind": "dflash", "markov_rank": 0, "confidence": False}
DFLASH2: Json = DFLASH | {"kind": "dflash2", "conv_group": 16, "selector_rank": 8, "selector_top_k": 4}
MIXED: Json = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 16}
SLIDING: Json = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}

FORMS: dict[str, Json] = {
    "dspark": {},
    "dspark gated": {"markov_head": "gated"},
    "dspark rnn": {"markov_head": "rnn"},
    "dspark, confidence without markov": {"confidence_with_markov": False},
    "dspark without confidence": {"confidence": False},
    "dspark causal": {"block_causal": True},
    "dspark full and sliding": MIXED,
    "dspark sliding": SLIDING,
    "dspark sliding causal": SLIDING | {"block_causal": True},
    "dspark, one draft, rank 1": {"draft_tokens": 1, "markov_rank": 1},
    "dspark, one tap": {"taps": (2,)},
    "dspark, seven taps": {"taps": tuple(range(7))},
    "dspark, every head a key": {"kv_heads": 4, "head_dim": 8},
    "dspark, one key head": {"kv_heads": 1, "head_dim": 24, "layers": 1},
    "dspark, other base and eps": {"rope_theta": 1e4, "eps": 1e-5, "layers": 3},
    "dflash": DFLASH,
    "dflash causal": DFLASH | {"block_causal": True},
    "dflash full and sliding": DFLASH | MIXED,
    "dflash sliding": DFLASH | SLIDING,
    "dflash2": DFLASH2,
    "dflash2, block of 8": DFLASH2 | {"draft_tokens": 7, "selector_top_k": 6},
    "dflash2 full and sliding": DFLASH2 | MIXED,
    "dflash2 causal": DFLASH2 | {"block_causal": True, "conv_group": 64},
}
CHAINS: dict[str, Json] = {"dspark": {}, "dflash": DFLASH, "dflash2": DFLASH2}  # behind a target's own states


def rope(**keys: Any) -> Callable[[Json, Tensors], None]:
    def change(config: Json, tensors: Tensors) -> None:
        config["rope_parameters"] |= keys

    return change


def drop(*names: str) -> Callable[[Json, Tensors], None]:
    def change(config: Json, tensors: Tensors) -> None:
        for name in names:
            del config[name]

    return change


def put(**keys: Any) -> Callable[[Json, Tensors], None]:
    return lambda config, tensors: config.update(keys)


def lose(name: str) -> Callable[[Json, Tensors], None]:
    def change(config: Json, tensors: Tensors) -> None:
        del tensors[name]

    return change


def prune(config: Json, tensors: Tensors) -> None:
    """A draft vocabulary of 40 ids, as the exports for other engines have it."""
    ids = torch.arange(40) * 6
    some = DraftVocabulary(ids, torch.ones(40, config["hidden_size"]), 1.0)
    tensors |= pruned(tensors, some) | {"d2t": some.offsets(), "t2d": some.member(config["vocab_size"])}
    config["draft_vocab_size"] = 40


def relabelled(config: Json, tensors: Tensors) -> None:
    """A DSpark trunk called DFlash: the block has one input more, and its slot 0 proposes nothing."""
    del config["dflash_config"]["projector_type"]
    config |= {"architectures": ["DFlashDraftModel"], "block_size": config["block_size"] + 1}


@dataclass(frozen=True)
class Refused:
    """What export refuses and SGLang is given all the same."""

    said: str  # SGLang's error, a part of it; "" where it loads and serves
    shape: Json = field(default_factory=dict)  # of the drafter
    change: Callable[[Json, Tensors], None] | None = None  # of config.json and the tensors
    job: Json = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # tensors of the file that SGLang drops without a word
    unloaded: tuple[str, ...] = ()  # parameters that it leaves as they were in memory, without a word
    same: bool = False  # served as if the refused thing was not there; else another forward than ours


ANCHOR_FIRST: Json = {"markov_rank": 0, "confidence": False}
REFUSED: dict[str, Refused] = {
    "last layer": Refused("DFLASH target_hidden feature dim mismatch", {"taps": (1, 3, 7)}, job={"target": "qwen3"}),
    "last layer, llama": Refused("DFLASH target_hidden feature dim mismatch", {"taps": (1, 3, 7)}, job={"target": "llama"}),
    "a layer that is not there": Refused("out-of-range layer id", {"taps": (1, 3, 8)}),
    "a layer twice": Refused("DFLASH target_hidden feature dim mismatch", {"taps": (1, 1, 5)}, job={"target": "qwen3"}),
    "layers out of order": Refused("", {"taps": (5, 1, 3)}, job={"target": "qwen3"}),
    "another hidden size": Refused("DFLASH target_hidden feature dim mismatch", {"hidden_size": 32}, job={"target": "qwen3"}),
    "reduced vocabulary, dspark": Refused("Attempted to load weight", change=prune),
    "reduced vocabulary, dflash": Refused("", DFLASH, prune, unused=("d2t", "lm_head.weight", "t2d"), same=True),
    "bidirectional sliding without is_causal": Refused("", SLIDING, drop("is_causal")),
    "sliding without use_sliding_window": Refused("require config.sliding_window", SLIDING, put(use_sliding_window=False)),
    "anchor-first without markov": Refused("DSpark draft requires markov_rank > 0", ANCHOR_FIRST),
    "anchor-first called dflash": Refused("", ANCHOR_FIRST, relabelled),
    "mask token outside the vocabulary": Refused("is outside the target vocab size 272", {"mask_token_id": 272}),
    "rope yarn": Refused("", change=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "rope linear": Refused("", change=rope(rope_type="linear", factor=4.0)),
    "rope partial": Refused("", change=rope(partial_rotary_factor=0.5), same=True),
    "rope partial, top level": Refused("", change=put(partial_rotary_factor=0.5), same=True),
    "rope of half a head": Refused("", change=rope(rope_dim=16)),
    "rope of neighbouring pairs": Refused("", change=put(rope_is_neox_style=False)),
    "rope mrope": Refused("", change=rope(rope_type="default", mrope_section=[4, 6, 6]), same=True),
    "a tensor missing": Refused("", change=lose("layers.1.mlp.up_proj.weight"), unloaded=("layers.1.mlp.gate_up_proj.weight",)),
    "markov tensors missing": Refused("", change=lose("markov_head.markov_w1.weight"), unloaded=("markov_head.markov_w1.weight",)),
    "mtp called dflash": Refused(
        "", DFLASH | {"kind": "mtp"}, unused=("heads.weight", "input_proj.weight", "state_norm.weight", "token_norm.weight")
    ),
}


def inputs(drafter: DrafterConfig, ids: int = 272) -> Tensors:
    """Embedding and head [V,D] of a target, its states [T,K*D], an anchor."""
    generator = torch.Generator().manual_seed(1)
    width = drafter.hidden_size
    return {
        "embedding": torch.randn(ids, width, generator=generator),
        "head": 0.15 * torch.randn(ids, width, generator=generator),
        "taps": torch.randn(CONTEXT, len(drafter.taps) * width, generator=generator),
        "ids": torch.randint(0, ids, (CONTEXT,), generator=generator),
        "anchor": torch.tensor(7),
    }


def targets(root: Path) -> dict[str, Path]:
    """Tiny random targets of 8 layers as Hugging Face folders."""
    shape = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 272, "max_position_embeddings": 4096, "initializer_range": 0.15,
    }  # fmt: skip
    torch.manual_seed(5)
    for name, kind, config in (("llama", LlamaForCausalLM, LlamaConfig), ("qwen3", Qwen3ForCausalLM, Qwen3Config)):
        kind(config(**shape)).save_pretrained(root / name)
    return {name: root / name for name in ("llama", "qwen3")}


def write(folder: Path, drafter: Drafter, change: Callable[[Json, Tensors], None] | None) -> Path:
    """An export that nobody checked."""
    shape = replace(drafter.config, kind="dflash") if drafter.config.kind == "mtp" else drafter.config  # mtp has no form of its own
    config = config_json(shape, "bfloat16")
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in drafter.state_dict().items()}
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def ours(drafter: Drafter, given: Tensors) -> Tensors:
    """The same round by the drafter's own decode path, in float32: states [G,D], logits [G,V], drafts and confidence [G]."""
    c = drafter.config
    shared = Shared(given["embedding"], given["head"], torch.nn.Identity(), c.mask_token_id)
    cache, row, anchor = DraftCache(drafter, shared, 1, CONTEXT + 1), torch.tensor([0]), given["anchor"].view(1)
    taps = given["taps"].view(1, CONTEXT, len(c.taps), c.hidden_size)
    cache.append(taps, torch.zeros(1, CONTEXT + 1, dtype=torch.long), torch.tensor([CONTEXT]), row)
    hidden = drafter.trunk.draft_states(shared, cache, row, anchor)
    proposal = walk(drafter, shared, hidden, anchor, [Law(temperature=0)])
    correct, base, before, logits = Corrector(drafter), base_logits(shared, hidden), anchor, []
    for slot in range(c.draft_tokens):
        logits.append(correct(base[:, slot], hidden[:, slot], before)[0][0].clone())
        before = proposal.tokens[:, slot]
    found = {"hidden": hidden[0], "logits": torch.stack(logits), "tokens": proposal.tokens[0]}
    return found if proposal.confidence is None else found | {"confidence": proposal.confidence[0]}


def rounded(drafter: Drafter) -> Drafter:
    """The drafter with the weights that a bfloat16 file has, in float32."""
    drafter.load_state_dict({name: value.bfloat16().float() for name, value in drafter.state_dict().items()})
    return drafter


def distance(theirs: list[Any], own: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of ours; logits that are left out (-inf) must be left out there."""
    found = torch.tensor(theirs, dtype=torch.float32)
    if found.shape != own.shape:
        return float("inf")
    kept = own > -1e29
    if not torch.equal(kept, found > -1e29):
        return float("inf")
    return float((found - own)[kept].abs().max() / own[kept].abs().max())
