"""Published layouts: checkpoints with the names and keys of the published code read, compute and come back as they were.

Names and keys are written out here from z-lab/dflash, deepseek-ai/DeepSpec and vLLM speculators 0.9, not taken from our
writers; the reference forward is `by_hand`'s, one block at a time from the file's tensors.
Legend: D hidden size, V vocabulary, K taps, T tokens, G draft tokens, r rank.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import test_dflash2
import torch
from safetensors.torch import load_file, save_file

from by_hand import F64, block_by_hand, confidence_by_hand, logits_by_hand
from specgraft.drafters.cache import DraftCache
from specgraft.drafters.drafter import Texts
from specgraft.drafters.layouts.registry import LAYOUTS, detect, read, write
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import Corrector
from specgraft.ops.sampling import Law

D, V, K, G, LAYERS, FFN, RANK, GROUP, MASK = 32, 48, 3, 3, 2, 40, 6, 8, 5
HEADS, KV, SIZE = 4, 2, 16  # 4 * 16 is not 32: a head size that is derived is wrong

QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": FFN,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 256,
    "max_window_layers": LAYERS,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": V,
}
FLAT = {**QWEN3, "dtype": "float32", "rope_theta": 10000.0}
ZLAB = {
    "architectures": ["DFlashDraftModel"],
    **FLAT,
    "block_size": G + 1,
    "is_causal": False,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 6]},
}
ZLAB2 = {
    "architectures": ["DFlash2DraftModel"],
    **FLAT,
    "is_causal": False,
    "num_target_layers": 8,
    "dflash_config": {
        "block_size": G + 1,
        "conv_group_size": GROUP,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": RANK,
        "selector_top_k": 4,
        "target_layer_ids": [1, 3, 6],
    },
}
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    **FLAT,
    "block_size": G,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 3, 6],
    "num_target_layers": 8,
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
}


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


PLAIN = {**without(DEEPSPEC, "confidence_head_with_markov", "markov_head_type"), "markov_rank": 0, "enable_confidence_head": False}


def speculators(kind: str, saved: str, block: int, from_anchor: bool, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [saved],
        "aux_hidden_state_layer_ids": [2, 4, 7],  # the embedding is layer 0
        "block_size": block,
        "draft_vocab_size": V,
        "dtype": "float32",
        "mask_token_id": MASK,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": G, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": QWEN3,
        **more,
    }


HEAD = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
CONV = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 4}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {  # layout and config.json
    "zlab dflash": ("zlab", ZLAB),
    "zlab dflash2": ("zlab", ZLAB2),
    "deepspec vanilla": ("deepspec", DEEPSPEC),
    "deepspec gated": ("deepspec", {**DEEPSPEC, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    "deepspec rnn": ("deepspec", {**DEEPSPEC, "markov_head_type": "rnn"}),
    "deepspec dflash": ("deepspec", PLAIN),
    "speculators dflash": ("speculators", speculators("dflash", "DFlashDraftModel", G + 1, False)),
    "speculators dflash2": ("speculators", speculators("dflash2", "DFlash2DraftModel", G + 1, False, **CONV)),
    "speculators vanilla": ("speculators", speculators("dspark", "DSparkDraftModel", G, True, **HEAD)),
    "speculators rnn": ("speculators", speculators("dspark", "DSparkDraftModel", G, True, **{**HEAD, "markov_head_type": "rnn"})),
}


def tensors_of(data: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the published names, from the keys of the config alone; norms not one."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, K * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for index in range(LAYERS):
        at = f"layers.{index}."
        shapes |= {
            at + "input_layernorm.weight": (D,),
            at + "mlp.down_proj.weight": (D, FFN),
            at + "mlp.gate_proj.weight": (FFN, D),
            at + "mlp.up_proj.weight": (FFN, D),
            at + "post_attention_layernorm.weight": (D,),
            at + "self_attn.k_norm.weight": (SIZE,),
            at + "self_attn.k_proj.weight": (KV * SIZE, D),
            at + "self_attn.o_proj.weight": (D, HEADS * SIZE),
            at + "self_attn.q_norm.weight": (SIZE,),
            at + "self_attn.q_proj.weight": (HEADS * SIZE, D),
            at + "self_attn.v_proj.weight": (KV * SIZE, D),
        }
        if "conv_group_size" in json.dumps(data):
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"{at}{part}.base_kernel"] = (2, 2, D)
                shapes[f"{at}{part}.kernel_projection.weight"] = (2 * 2 * D // GROUP, D)
    if "conv_group_size" in json.dumps(data):
        shapes["candidate_selector.predecessor_codebook"] = shapes["candidate_selector.successor_codebook"] = (V, RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, D)
    if data.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = shapes["markov_head.markov_w2.weight"] = (V, RANK)
        if data["markov_head_type"] == "gated":
            shapes |= {"markov_head.gate_proj.weight": (RANK, D + RANK), "markov_head.gate_proj.bias": (RANK,)}
        if data["markov_head_type"] == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + D), "markov_head.joint_proj.bias": (3 * RANK,)}
    if data.get("enable_confidence_head"):
        width = D + (RANK if data["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if "norm" in name or "base_kernel" in name else 0.0) + 0.3 * torch.randn(shape, generator=generator)
        for name, shape in sorted(shapes.items())
    }


def lay(folder, data: dict[str, Any], tensors: dict[str, torch.Tensor]):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_published_checkpoint_computes_what_its_tensors_say(form: str, tmp_path, capsys) -> None:
    """States, logits and confidence of blocks against `by_hand` on the file's own tensors, and greedy drafts by them."""
    layout, data = FORMS[form]
    tensors = tensors_of(data)
    folder = lay(tmp_path / "a", data, tensors)
    assert detect(folder) == layout
    drafter = read(folder).double()
    assert capsys.readouterr().err == ""
    c = drafter.config
    assert c.kind == {"vanilla": "dspark", "gated": "dspark", "rnn": "dspark"}.get(form.split()[1], form.split()[1]) or form == "deepspec dflash"
    assert c.draft_tokens == G and c.taps == (1, 3, 6) and c.mask_token_id == MASK and c.head_dim == SIZE
    assert c.target_layers == (0 if layout == "speculators" else 8)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, V, (1, 12), generator=generator)
    taps = torch.randn(1, 12, K, D, generator=generator, dtype=F64)
    embedding, head = (torch.randn(V, D, generator=generator, dtype=F64) for _ in range(2))
    shared = Shared(embedding, head, torch.nn.Identity(), MASK)
    anchors = torch.tensor([[2, 5, 8]])
    hidden = drafter(shared, Texts(ids, taps, torch.zeros_like(ids)), anchors)[0]
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    theirs: Any = SimpleNamespace(config=c, named_parameters=lambda: wide.items())
    by_hand = test_dflash2.block_by_hand if c.kind == "dflash2" else block_by_hand
    for block, anchor in enumerate(anchors[0].tolist()):
        states = by_hand(theirs, shared, ids[0].tolist(), taps[0], anchor)
        torch.testing.assert_close(hidden[block], states, rtol=0, atol=1e-9)
        previous = ids[0, anchor : anchor + G].tolist()
        correct = Corrector(drafter)
        rows = [correct((head @ h)[None], h[None], torch.tensor([y])) for h, y in zip(hidden[block], previous, strict=True)]
        if c.kind == "dflash2":
            for slot in range(G):
                scores = selector_by_hand(wide, head @ states[slot], states[slot], previous[slot], 4)
                torch.testing.assert_close(rows[slot][0][0], scores, rtol=0, atol=1e-9)
        else:
            expected = logits_by_hand(theirs, shared, states, previous)
            torch.testing.assert_close(torch.cat([row[0] for row in rows]), expected, rtol=0, atol=1e-9)
        for slot in range(G):
            assert (rows[slot][1] is None) is not c.confidence
            if c.confidence:
                torch.testing.assert_close(rows[slot][1][0], confidence_by_hand(theirs, states[slot], previous[slot]), rtol=0, atol=1e-9)
    cache = DraftCache(drafter, shared, 1, 12)
    cache.append(taps[:, :5], ids[:, :6], torch.tensor([5]), torch.tensor([0]))
    drafts = drafter.draft(shared, cache, torch.tensor([0]), ids[:, 5], [Law()]).tokens[0].tolist()
    states, y, correct = by_hand(theirs, shared, ids[0].tolist(), taps[0], 5), int(ids[0, 5]), Corrector(drafter)
    for slot in range(G):
        y = int(correct((head @ states[slot])[None], states[slot][None], torch.tensor([y]))[0].argmax())
        assert drafts[slot] == y


def selector_by_hand(w: dict[str, torch.Tensor], unary: torch.Tensor, h: torch.Tensor, y: int, top: int) -> torch.Tensor:
    gate = w["candidate_selector.predecessor_codebook"][y] * (w["candidate_selector.hidden_projection.weight"] @ h)
    keep = sorted(range(V), key=lambda v: -float(unary[v]))[:top]
    scores = torch.full((V,), -torch.inf, dtype=F64)
    for v in keep:
        scores[v] = unary[v] + gate @ w["candidate_selector.successor_codebook"][v]
    return scores


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_written_again_key_by_key_and_bit_by_bit(form: str, dtype: str, tmp_path) -> None:
    layout, data = FORMS[form]
    data = {**data, "dtype": dtype}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors_of(data).items()}
    drafter = read(lay(tmp_path / "a", data, tensors))
    write(drafter, tmp_path / "b", layout, dtype)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == data
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name
    assert read(tmp_path / "b").config == drafter.config
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_configs_as_they_were_published_are_read(tmp_path) -> None:
    """config.json of z-lab/Qwen3-4B-DFlash-b16 and z-lab/Qwen3.8-27B-DFlash2, at tiny sizes: older and newer spelling."""
    old = {
        **without(FLAT, "rope_parameters", "max_window_layers"),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 6]},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "num_target_layers": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.3",
        "use_cache": True,
    }
    found = read(lay(tmp_path / "old", old, tensors_of(old))).config
    assert (found.kind, found.draft_tokens, found.rope_theta, found.block_causal) == ("dflash", 15, 1e6, False)
    new = {
        **without(ZLAB2, "rope_theta"),
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 64,
        "use_sliding_window": True,
        "bos_token_id": None,
        "pad_token_id": 3,
    }
    found = read(lay(tmp_path / "new", new, tensors_of(new))).config
    assert (found.kind, found.draft_tokens, found.sliding_window, found.block_causal) == ("dflash2", 3, 64, False)
    assert (found.conv_group, found.selector_rank, found.selector_top_k) == (GROUP, RANK, 4)
    assert set(found.layer_types) == {"sliding_attention"}
    causal = {**new, "is_causal": True}
    assert read(lay(tmp_path / "causal", causal, tensors_of(causal))).config.block_causal


def test_the_export_for_sglang_is_read_as_deepspec(tmp_path) -> None:
    """The keys that SGLang reads twice, and the alignment said aloud."""
    data = {
        **DEEPSPEC,
        "sample_from_anchor": True,
        "is_causal": False,
        "dflash_config": {"projector_type": "dspark", "mask_token_id": MASK, "target_layer_ids": [1, 3, 6]},
    }
    assert read(lay(tmp_path / "a", data, tensors_of(data))).config.kind == "dspark"
    data["dflash_config"]["target_layer_ids"] = [2, 4, 7]
    with pytest.raises(ValueError, match=r"dflash_config\.target_layer_ids=\[2, 4, 7\] and target_layer_ids=\[1, 3, 6\] disagree"):
        read(lay(tmp_path / "b", data, tensors_of(data)))


def test_block_size_counts_the_anchor_where_dflash_is_published_and_drafts_where_dspark_is(tmp_path) -> None:
    """faults.md D4: block 4 of DFlash and block 3 of DSpark are three drafts; so is what speculators says of the anchor."""
    for number, (data, kind) in enumerate((
        (ZLAB, "dflash"),
        (PLAIN, "dspark"),
        (speculators("dflash", "DFlashDraftModel", 4, False), "dflash"),
        (speculators("dflash", "DFlashDraftModel", 3, True), "dspark"),  # DSpark's alignment, no heads
    )):  # fmt: skip
        found = read(lay(tmp_path / str(number), data, tensors_of(data))).config
        assert (found.kind, found.draft_tokens, found.markov_rank, found.confidence) == (kind, 3, 0, False)


def test_causal_sliding_blocks_of_speculators(tmp_path, capsys) -> None:
    trunk = {**QWEN3, "layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
    data = {**speculators("dflash", "DFlashDraftModel", 4, False), "transformer_layer_config": trunk, "sliding_window_non_causal": False}
    drafter = read(lay(tmp_path / "a", data, tensors_of(data)))
    assert drafter.config.block_causal and "counts a window from the anchor" in capsys.readouterr().err
    write(drafter, tmp_path / "b", "speculators", "float32")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == data
    trunk["layer_types"] = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"transformer_layer_config\.layer_types mixes full layers"):
        read(lay(tmp_path / "c", data, tensors_of(data)))
    data["sliding_window_non_causal"] = True
    assert not read(lay(tmp_path / "d", data, tensors_of(data))).config.block_causal


NEEDED = {
    "zlab dflash": ["block_size", "num_target_layers", "dflash_config", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"],
    "zlab dflash2": [f"dflash_config.{name}" for name in ZLAB2["dflash_config"]],
    "deepspec vanilla": [
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov",
    ],
    "speculators vanilla": [
        "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor", *HEAD,
        "sliding_window_non_causal", "transformer_layer_config", "transformer_layer_config.head_dim",
    ],
    "speculators dflash2": list(CONV),
}  # fmt: skip
TRUNK = [
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size",
]  # fmt: skip


def changed(data: dict[str, Any], dotted: str, *value: Any) -> dict[str, Any]:
    """A copy with one key set to `value`, or without it."""
    data = copy.deepcopy(data)
    *path, last = dotted.split(".")
    node = data
    for key in path:
        node = node[key]
    if value:
        node[last] = value[0]
    else:
        del node[last]
    return data


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in NEEDED.items() for name in names] + [("zlab dflash", n) for n in TRUNK])
def test_a_missing_field_is_an_error_that_names_it(form: str, name: str, tmp_path) -> None:
    """faults.md C3, D4, E4: what is missing is never guessed."""
    data = changed(FORMS[form][1], name)
    folder = lay(tmp_path / "a", data, {"fc.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=rf"config\.json: ([a-z_]+\.)?{name.rpartition('.')[2]} is missing") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "name", "value", "why"),
    [
        ("zlab dflash", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_type='yarn' is not supported"),
        ("zlab dflash", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, "mrope_section is not supported"),
        ("zlab dflash", "rope_parameters", {"rope_theta": 1e4}, "rope_type is missing"),
        ("zlab dflash", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling=.* is not supported"),
        ("zlab dflash", "rope_theta", 5e5, "disagree"),
        ("zlab dflash", "partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported, only 1"),
        ("zlab dflash", "attention_bias", True, "attention_bias=True is not supported"),
        ("zlab dflash", "hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("zlab dflash", "quantization_config", {"bits": 4}, "quantization_config=.* is not supported$"),
        ("zlab dflash", "layer_types", ["full_attention"], "layer_types has 1 entries for num_hidden_layers=2"),
        ("zlab dflash", "layer_types", ["full_attention", "linear"], "names 'linear'"),
        ("zlab dflash", "layer_types", ["sliding_attention"] * 2, "use_sliding_window=false"),
        ("zlab dflash", "head_dim", "16", "head_dim='16' is not a whole number"),
        ("zlab dflash", "head_dim", True, "head_dim=True is not a whole number"),
        ("zlab dflash", "dflash_config.target_layer_ids", [1, 3, 8], "the target's layers are 0 to 7"),
        ("zlab dflash", "dflash_config.target_layer_ids", [-1, 3, 6], "its embedding is no tap"),
        ("zlab dflash", "dflash_config.target_layer_ids", [1, 1, 6], "must name layers, each once"),
        ("zlab dflash", "dflash_config.target_layer_ids", ["1"], "does not hold int values only"),
        ("zlab dflash", "dflash_config.block_size", 8, "block_size=4 and dflash_config.block_size=8 disagree"),
        ("zlab dflash", "dflash_config.projector_type", "domino", "projector_type='domino' is not supported"),
        ("zlab dflash", "dflash_config.attention_sink_bias", True, "attention_sink_bias=True is not supported"),
        ("zlab dflash", "dflash_config.selector_rank", 6, "selector_rank is not known for dflash"),
        ("zlab dflash2", "dflash_config.output_multiplier", 0.2, "output_multiplier=0.2 is not supported"),
        ("zlab dflash2", "dflash_config.final_logit_softcapping", 20.0, "final_logit_softcapping=20.0 is not supported"),
        ("zlab dflash2", "dflash_config.conv_kernel_size", 3, "conv_kernel_size=3 is not supported, only 2"),
        ("zlab dflash2", "dflash_config.conv_group_size", 5, "conv_group=5 must divide"),
        ("zlab dflash2", "dflash_config.selector_top_k", 100, "selector_top_k=100"),
        ("deepspec vanilla", "sample_from_anchor", False, "sample_from_anchor=False is not supported, only True"),
        ("deepspec vanilla", "markov_head_type", "mlp", "markov_head_type='mlp' is not supported"),
        ("deepspec vanilla", "layer_types", ["sliding_attention"] * 2, "use_sliding_window"),
        ("speculators vanilla", "sample_from_anchor", False, "sample_from_anchor=false is not supported for dspark"),
        ("speculators dflash2", "sample_from_anchor", True, "sample_from_anchor=true is not supported for dflash2"),
        ("speculators dflash", "draft_vocab_size", 32, "a reduced vocabulary is not supported"),
        ("speculators dflash", "target_hidden_size", 64, "target_hidden_size=64 is not supported, only 32"),
        ("speculators dflash", "aux_hidden_state_layer_ids", [0, 3, 6], "the target's layers are 1 and above"),
        ("speculators dflash", "speculators_model_type", "eagle3", "'eagle3' is not supported, only dflash, dflash2, dspark"),
    ],
)
def test_what_makes_another_model_is_refused_by_name(form: str, name: str, value: Any, why: str, tmp_path) -> None:
    data = changed(FORMS[form][1], name, value)
    with pytest.raises(ValueError, match=why) as caught:
        read(lay(tmp_path / "a", data, tensors_of(FORMS[form][1])))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_sliding_layers_ask_for_causality_to_be_said(tmp_path) -> None:
    """Readers disagree on it: z-lab's code takes a missing `is_causal` for causal, others for both ways."""
    data = {**without(ZLAB, "is_causal"), "layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
    with pytest.raises(ValueError, match="is_causal is missing"):
        read(lay(tmp_path / "a", data, tensors_of(data)))


def test_tensors_are_exactly_those_of_the_config(tmp_path) -> None:
    """faults.md E5: one missing, one extra, one of another shape, one not finite, one not a number; each named."""
    good = tensors_of(DEEPSPEC)
    faults: list[tuple[dict[str, torch.Tensor], str]] = [
        ({n: t for n, t in good.items() if n != "layers.1.mlp.up_proj.weight"}, r"tensor layers\.1\.mlp\.up_proj\.weight is missing$"),
        ({n: t for n, t in good.items() if "layers.1" not in n}, r"is missing \(and 10 more\)"),
        ({**good, "enc.aux_norm.weight": torch.ones(D)}, r"tensor enc\.aux_norm\.weight is not of this dspark drafter"),
        ({f"model.{n}": t for n, t in good.items()}, "is missing"),
        ({**good, "fc.weight": torch.zeros(D, 2 * D)}, r"fc\.weight is \(32, 64\), its config says \(32, 96\)"),
        ({**good, "norm.weight": torch.full((D,), torch.nan)}, r"norm\.weight \(float32\) holds no finite numbers"),
        ({**good, "norm.weight": torch.ones(D, dtype=torch.int8)}, r"norm\.weight \(int8\) holds no finite numbers"),
        ({**good, "lm_head.weight": torch.zeros(V - 1, D)}, r"lm_head\.weight is \(47, 32\), its config says \(48, 32\)"),
    ]
    for number, (tensors, why) in enumerate(faults):
        with pytest.raises(ValueError, match=why) as caught:
            read(lay(tmp_path / str(number), DEEPSPEC, tensors))
        assert "\n" not in str(caught.value)


def test_the_targets_own_tensors_are_left_out_and_said(tmp_path, capsys) -> None:
    """DeepSpec saves embedding and head with the draft; older speculators the verifier's norm too."""
    shared = {"embed_tokens.weight": torch.randn(V, D), "lm_head.weight": torch.randn(V, D)}
    drafter = read(lay(tmp_path / "a", DEEPSPEC, {**tensors_of(DEEPSPEC), **shared}))
    assert "left out embed_tokens.weight, lm_head.weight" in capsys.readouterr().err
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())
    data = FORMS["speculators vanilla"][1]
    read(lay(tmp_path / "b", data, {**tensors_of(data), "verifier_norm.weight": torch.ones(D)}))
    assert "left out verifier_norm.weight" in capsys.readouterr().err
    with pytest.raises(ValueError, match="verifier_norm"):
        read(lay(tmp_path / "c", DEEPSPEC, {**tensors_of(DEEPSPEC), "verifier_norm.weight": torch.ones(D)}))


def test_weights_in_several_files_are_one_checkpoint(tmp_path) -> None:
    tensors = tensors_of(ZLAB)
    folder = lay(tmp_path / "a", ZLAB, tensors)
    whole = read(folder).state_dict()
    (folder / "model.safetensors").unlink()
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    again = read(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors: cannot be read"):
        read(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="no file name"):
        read(folder)


def test_folders_that_hold_no_known_layout_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="is no JSON object"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma4DSparkModel"]}))
    with pytest.raises(ValueError, match=r"\['Gemma4DSparkModel'\] is no published layout that is known \(speculators, deepspec, zlab\)"):
        detect(tmp_path)
    folder = lay(tmp_path / "a", ZLAB, tensors_of(ZLAB))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding"):
        read(folder)
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        read(folder)


def test_nothing_is_written_over_and_what_has_no_form_is_refused(tmp_path, tiny_target, tiny_drafter) -> None:
    """faults.md U2."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    notes = tmp_path / "full" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ValueError, match="is not empty and nothing is written over"):
        write(drafter, notes.parent, "deepspec")
    assert notes.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="known are speculators, deepspec, zlab"):
        write(drafter, tmp_path / "a", "nemo")
    mtp = tiny_drafter(target, kind="mtp")
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match=f"a mtp drafter has no form in the {layout} layout"):
            write(mtp, tmp_path / "a", layout)
    causal = tiny_drafter(target, block_causal=True)
    for layout in ("deepspec", "speculators"):
        with pytest.raises(ValueError, match=f"the {layout} layout has"):
            write(causal, tmp_path / "a", layout)
    assert len(list(tmp_path.iterdir())) == 1
