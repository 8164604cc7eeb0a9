"""`pilot --tiny`: the graph of a run file whose target fits no machine here, on a random target of as many layers that fits any.

Kept from the run file: taps, kind and draft tokens of the drafter, objectives, the medium, the engine to export for. Made small:
widths, texts, steps. The servers' place is taken by this process.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specgraft.config import RunConfig

LAYERS = 48
FULL_EVERY = 4  # Solar Open 2: layers 0, 4, .. 44 attend, the others are KDA
CONTEXT = 1024
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>", "<|pad|>", "<|mask|>"]
MASK = 256 + SPECIAL.index("<|mask|>")  # behind the bytes

# sizes that do not change what runs; texts short enough for 48 layers on a CPU
SMALL: dict[str, dict[str, Any]] = {
    "prompts": {"source": "builtin", "sources": [], "suites": [], "lengths": {}, "train": 12, "held_out": 4, "languages": {"en": 1.0}, "max_tokens": 480},
    "regen": {"servers": [], "by_domain": {}, "max_new_tokens": 20, "batch": 16, "group": 16, "greedy_share": 0.5, "answers": "target", "cut": "keep"},
    "capture": {"servers": [], "target": "whole", "max_length": 512, "batch_tokens": 2048},
    "drafters": {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "layer_types": "full", "sliding_window": 64, "markov_rank": 16,
                 "selector_rank": 16, "warm_from": "", "warm_layers": "none"},
    "stream": {"group": 1, "bound_mb": 64.0, "producers": 2, "gpus": 0.0, "address": ""},
    "train": {"steps": 4, "rows": 4, "accumulate": 2, "anchors": 8, "lr": 1e-3, "compute": "float32", "max_length": 512, "row_tokens": 2048, "parallel": "ddp",
              "checkpoint_every": 2, "validate_every": 2, "validate_rows": 2, "decode_prompts": 0, "compile": False},
    "evaluate": {"prompts": 4, "sampled_prompts": 2, "max_new_tokens": 12, "batch": 4, "speed_prompts": 1, "speed_dtype": "float32", "examples": 1},
    "export": {"bundle": False, "vocabulary": 0, "target_gguf": ""},
    "check": {"overfit_steps": 300, "overfit_tokens": 16},
}  # fmt: skip


def tiny(config: RunConfig) -> RunConfig:
    """The run file made small, with the random target's folder under the run's own, where it is made if it is not there.

    Raises ValueError for taps that the target does not have, and where transformers lacks the model.
    """
    taps = config.capture.taps
    if isinstance(taps, list) and max(taps) >= LAYERS:
        raise ValueError(f"--tiny: its target has layers 0 to {LAYERS - 1} and capture.taps names {max(taps)}")
    name = f"{config.run.name}-tiny"
    folder = Path(config.run.root).expanduser() / name / "target"
    make_target(folder)
    found: dict[str, Any] = config.model_dump()
    for section, values in SMALL.items():
        found[section] |= values
    found["run"] |= {"name": name, "device": "cpu"}
    found["target"] = {"id": str(folder), "dtype": "float32", "mask_token_id": MASK}
    return RunConfig.model_validate(found)


def make_target(folder: Path, seed: int = 0) -> None:
    """A Hugging Face folder: 48 layers of kimi_linear with random weights, experts in every layer, bytes for tokens. Written aside and renamed."""
    if (folder / "config.json").is_file():
        return
    import torch
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    model, tokenizer = random_model(seed), byte_tokenizer()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with torch.no_grad():
            model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        os.chmod(aside, 0o755)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def random_model(seed: int) -> Any:
    """Weights large enough that every layer changes the state: neighbouring layers must be told apart."""
    import torch

    try:
        module = importlib.import_module("transformers.models.kimi_linear")
        config_class, model_class = module.KimiLinearConfig, module.KimiLinearForCausalLM
    except (ImportError, AttributeError):
        raise ValueError("--tiny needs kimi_linear, which this transformers does not have: install a newer one") from None
    types = ["linear_attention" if layer % FULL_EVERY else "full_attention" for layer in range(LAYERS)]
    config = config_class(
        vocab_size=256 + len(SPECIAL), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, linear_head_dim=16, linear_num_heads=4, linear_conv_kernel_dim=4,
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, layer_types=types, mlp_layer_types=["sparse"] * LAYERS,
        max_position_embeddings=CONTEXT, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=256 + SPECIAL.index("<|end|>"), pad_token_id=256 + SPECIAL.index("<|pad|>"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:  # of the router
                value.copy_(torch.randn_like(value) * 0.1)
            elif "A_log" in name:  # as transformers makes it, a state forgets all within a few dozen tokens
                value.copy_(torch.empty_like(value).uniform_(0.01, 0.3).log())
            elif "norm" in name:  # at one, a norm left out or applied twice hides its weight
                value.add_(torch.randn_like(value) * 0.1)
        model.get_input_embeddings().weight.mul_(5)
    return model.eval()


def byte_tokenizer() -> Any:
    """256 bytes and four special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner: Any = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", mask_token="<|mask|>", chat_template=TEMPLATE)
