"""The drafter as one GGUF file for llama.cpp b11434: architecture `dflash`, DSpark where there is a Markov head.

Layer ids are one higher than ours there (input of layer i+1 = output of layer i). No embedding is in the file, and a head only
with a draft vocabulary: both are the target's. Source: llama.cpp src/models/dflash.cpp and conversion/qwen.py, b11434.
Legend: D hidden size, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.convolution import TAPS
from specgraft.export.contract import expected_tensors

NAME = "drafter.gguf"
ARCHITECTURE = "dflash"
SCHEMA = "specgraft.schema"  # beside llama.cpp's own keys: what this file's tensors and keys mean
VERSION = "llama.cpp b11434, 1"
DRAFTER = "specgraft.drafter"  # JSON of the drafter's config: what llama.cpp has no key for
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
WHOLE = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
Value = tuple[str, Any]  # GGUF type (U32, F32, BOOL, STRING, I32 list), value


def tensor_name(ours: str) -> str:
    """llama.cpp's name of a tensor of ours."""
    if ours in WHOLE:
        return WHOLE[ours]
    _, index, rest = ours.split(".", 2)
    return f"blk.{index}.{IN_LAYER[rest]}"


def metadata(c: DrafterConfig) -> dict[str, Value]:
    """Every key but the tokenizer's; nothing is left to llama.cpp's defaults (its block size would be 16)."""
    dspark = c.kind == "dspark"
    found: dict[str, Value] = {
        "block_count": ("U32", c.layers),
        "context_length": ("U32", c.max_positions),
        "embedding_length": ("U32", c.hidden_size),
        "feed_forward_length": ("U32", c.intermediate),
        "attention.head_count": ("U32", c.heads),
        "attention.head_count_kv": ("U32", c.kv_heads),
        "attention.key_length": ("U32", c.head_dim),
        "attention.value_length": ("U32", c.head_dim),
        "attention.layer_norm_rms_epsilon": ("F32", c.eps),
        "attention.causal": ("BOOL", c.block_causal),
        "rope.freq_base": ("F32", c.rope_theta),
        "vocab_size": ("U32", c.vocab_size),
        "block_size": ("U32", c.draft_tokens if dspark else c.draft_tokens + 1),  # drafts, or inputs with the anchor
        "target_layers": ("I32", [tap + 1 for tap in c.taps]),
    }
    if dspark:
        found |= {"sample_from_anchor": ("BOOL", True), "has_confidence_head": ("BOOL", c.confidence)}
    if c.kind == "dflash2":
        found |= {
            "conv_kernel_size": ("U32", TAPS),
            "conv_group_size": ("U32", c.conv_group),
            "selector_rank": ("U32", c.selector_rank),
            "selector_top_k": ("U32", c.selector_top_k),
        }
    found = {f"{ARCHITECTURE}.{key}": value for key, value in found.items()}
    found["tokenizer.ggml.mask_token_id"] = ("U32", c.mask_token_id)
    found[SCHEMA] = ("STRING", VERSION)
    found[DRAFTER] = ("STRING", json.dumps(asdict(c)))
    return found


def write(path: Path, c: DrafterConfig, tensors: dict[str, torch.Tensor], dtype: str, tokenizer: dict[str, Any], ids: torch.Tensor | None) -> None:
    """Writes the file. `tokenizer` are the target's `tokenizer.*` fields; `ids` [v] the draft vocabulary, absolute, or None."""
    gguf = package()
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    for key, (form, value) in metadata(c).items():
        if form == "I32":
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType["UINT32" if form == "U32" else "FLOAT32" if form == "F32" else form])
    for key, (value, form, inner) in tokenizer.items():
        if key != "tokenizer.ggml.mask_token_id":
            writer.add_key_value(key, value, form, inner)
    for ours, tensor in tensors.items():
        data = tensor.detach().float().cpu().numpy()
        plain = data.ndim != 2 or ours.startswith("confidence_head")  # as llama.cpp's own converter: vectors and kernels in float32
        used = gguf.GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(tensor_name(ours), gguf.quants.quantize(data, used), raw_dtype=used)
    if ids is not None:
        writer.add_tensor("d2t", ids.numpy().astype(np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> tuple[DrafterConfig, dict[str, torch.Tensor], str, torch.Tensor | None]:
    """Config, tensors under our names in float32, dtype of the matrices, draft vocabulary. Strict: every key and tensor as written.

    Raises ValueError naming the key or tensor that is missing, extra or wrong, or a schema that is not known.
    """
    gguf = package()
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0] if str(error) else 'damaged'}); run export again") from None
    found = {name: field.contents() for name, field in reader.fields.items()}
    if found.get(SCHEMA) != VERSION:
        raise ValueError(f"{path}: {SCHEMA} is {found.get(SCHEMA)!r}, this version knows {VERSION!r}; run export again")
    data = json.loads(found[DRAFTER])
    config = DrafterConfig.from_json(data)
    for key, (form, value) in metadata(config).items():
        have = found.get(key)
        same = have == (float(np.float32(value)) if form == "F32" else value)
        if not same:
            raise ValueError(f"{path}: {key} is {have!r}, the contract wants {value!r}; run export again")
    back = {tensor_name(ours): ours for ours in expected_tensors(config)}
    tensors: dict[str, torch.Tensor] = {}
    ids, kinds = None, set()
    for tensor in reader.tensors:
        if tensor.name == "d2t":
            ids = torch.from_numpy(np.array(tensor.data).copy()).long()
            continue
        ours = "lm_head.weight" if tensor.name == "output.weight" else back.pop(tensor.name, None)
        if ours is None:
            raise ValueError(f"{path}: tensor {tensor.name} is not in the contract; run export again")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[ours] = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(*(int(n) for n in reversed(tensor.shape)))
        if len(tensor.shape) == 2 and not ours.startswith("confidence_head"):
            kinds.add(tensor.tensor_type.name)
    if back:
        raise ValueError(f"{path}: tensor {min(back)} is missing; run export again")
    if (ids is None) != ("lm_head.weight" not in tensors):
        raise ValueError(f"{path}: d2t and output.weight belong together, one is missing; run export again")
    dtype = next((name for name, kind in TYPES.items() if {kind} == kinds), "mixed")
    return config, tensors, dtype, ids


def tokenizer_fields(folder: Path, gguf_path: str) -> dict[str, Any]:
    """The target's tokenizer as `tokenizer.*` GGUF fields (value, type, inner type), from its own .gguf or its tokenizer.json.

    llama.cpp never tokenises with the drafter; it needs the number of tokens and the mask id. Raises ValueError naming the file.
    """
    if gguf_path:
        return _copied(Path(gguf_path))
    return _built(folder)


def _copied(path: Path) -> dict[str, Any]:
    gguf = package()
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set export.target_gguf to the target's .gguf, or leave it out")
    try:
        fields = gguf.GGUFReader(path).fields
    except (OSError, ValueError, IndexError):
        raise ValueError(f"{path}: is no GGUF file; set export.target_gguf to the target's .gguf, or leave it out") from None
    found = {}
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if len(field.types) > 1 else None
            found[name] = (field.contents(), field.types[0], inner)
    if "tokenizer.ggml.tokens" not in found:
        raise ValueError(f"{path}: holds no tokenizer; set export.target_gguf to the target's .gguf, or leave it out")
    return found


def _built(folder: Path) -> dict[str, Any]:
    gguf = package()
    path = folder / "tokenizer.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = dict(data["model"]["vocab"])
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in data["model"]["merges"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: holds no BPE tokenizer; set export.target_gguf to the target's .gguf, whose tokenizer is copied") from None
    special = {entry["content"]: bool(entry["special"]) for entry in data.get("added_tokens", [])}
    vocabulary |= {entry["content"]: entry["id"] for entry in data.get("added_tokens", [])}
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = shape.get("text_config", shape)["vocab_size"]
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for text, number in vocabulary.items():
        if number < size:
            tokens[number] = text
            kind = gguf.TokenType.CONTROL if special.get(text) else gguf.TokenType.USER_DEFINED if text in special else gguf.TokenType.NORMAL
            types[number] = int(kind)
    kinds = gguf.GGUFValueType
    return {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING, None),
        "tokenizer.ggml.pre": ("default", kinds.STRING, None),
        "tokenizer.ggml.tokens": (tokens, kinds.ARRAY, kinds.STRING),
        "tokenizer.ggml.token_type": (types, kinds.ARRAY, kinds.INT32),
        "tokenizer.ggml.merges": (merges, kinds.ARRAY, kinds.STRING),
    }


def package() -> Any:
    """The module `gguf`. Raises ValueError saying how to get it."""
    try:
        import gguf
    except ImportError:
        raise ValueError("export.to=\"llamacpp\" needs the package gguf: pip install 'specgraft[llamacpp]'") from None
    return gguf
