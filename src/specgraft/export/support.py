"""Which target kinds an engine reads hidden states of, by `model_type` of their config. Sources: SGLang 0.5.23
(`set_dflash_layers_to_capture`), llama.cpp b11434 (`t_layer_inp`); vLLM says so only when it loads the target.
"""

from __future__ import annotations

SGLANG = frozenset(
    """qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text llama phi3 internlm3 gpt_oss
    deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite kimi_k25 kimi_k3 laguna lfm2 lfm2_moe minicpmv minimax_m3_vl nemotron_h""".split()
)
# states are handed out, but the drafter's tokens go through the target's scaled or normed embedding; drafters here are
# trained on the rows as stored (`Shared.embed`)
SGLANG_EMBEDS = {"gemma4": "multiplies", "gemma4_text": "multiplies", "inkling": "normalises"}
SGLANG_DSPARK = frozenset({"kimi_linear", "deepseek_v4", "bailing_moe_v3"})  # by the DSPARK worker only
LLAMACPP = frozenset(
    """llama qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp gemma4 gemma4_text gpt_oss lfm2 minimax_m2
    nemotron_h deepseek_v4""".split()
)


def unsupported(to: str, kind: str, target: str | None) -> str:
    """Why engine `to` cannot feed a drafter of this kind from this type of target, or nothing. None: nobody says what it is."""
    if target is None or _reads(to, kind, target):
        return ""
    others = _others(kind, target)
    if to == "sglang" and target in SGLANG_EMBEDS:
        return f"sglang {SGLANG_EMBEDS[target]} a {target} target's embeddings before a drafter reads them, ours reads them as stored: {others}"
    return f"{to} hands out no hidden states of a {target} target: {others}"


def _others(kind: str, target: str) -> str:
    names = [name for name in ("sglang", "llamacpp", "vllm", "hf") if _reads(name, kind, target)]
    return f"use export.to={' or '.join(repr(name) for name in names)}"


def _reads(to: str, kind: str, target: str) -> bool:
    known = {"sglang": SGLANG | (SGLANG_DSPARK if kind == "dspark" else frozenset()), "llamacpp": LLAMACPP}
    return target in known.get(to, {target})
