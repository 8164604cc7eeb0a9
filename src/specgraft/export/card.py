"""The model card of an export: what it is, how it was made, what was measured, how it is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgraft.drafters.config import DrafterConfig


def model_card(
    config: DrafterConfig, target: str, to: str, provenance: Mapping[str, Any], evaluation: Mapping[str, Any] | None
) -> str:
    """Markdown. `evaluation` is evaluate.json of this very checkpoint, or None: then no number is claimed."""
    parts = [
        f"# {NAMES[config.kind]} drafter for {target}",
        f"A draft model for speculative decoding: it proposes {config.draft_tokens} tokens a round, the target verifies them. "
        "The text stays the target's own. Embedding and output head are the target's and are not in this file; it works "
        "with no other target.",
        _made(config, provenance),
        _measured(evaluation),
        LAUNCH[to](config),
    ]
    return "\n\n".join(parts) + "\n"


def _made(config: DrafterConfig, provenance: Mapping[str, Any]) -> str:
    rows = [
        "## How it was made",
        "Trained by specgraft on the target's own answers and hidden states; provenance.json has versions, settings and digests.",
        "",
        "| what | value |",
        "|---|---|",
        f"| draft layers | {config.layers}, hidden size {config.hidden_size}, {config.heads} query and {config.kv_heads} "
        f"key/value heads of {config.head_dim} |",
        f"| target layers read | {', '.join(map(str, config.taps))} of {config.target_layers} "
        "(outputs of decoder layers, from 0, before any norm) |",
        *([f"| Markov head | {config.markov_head}, rank {config.markov_rank} |"] if config.markov_rank else []),
        *([f"| selector | rank {config.selector_rank}, {config.selector_top_k} candidates |"] if config.selector_rank else []),
        f"| mask token | {config.mask_token_id} |",
        f"| steps | {provenance.get('step', 'unknown')} |",
        *_vocabulary(provenance.get("draft_vocabulary")),
    ]
    return "\n".join(rows)


def _measured(evaluation: Mapping[str, Any] | None) -> str:
    title = "## Measured\n"
    if not evaluation:
        return title + "\nNothing was measured for this checkpoint yet (`specgraft evaluate`)."
    settings = evaluation.get("settings", {})
    rows = ["Held-out conversations, speculative decoding in process; the bonus token is counted.", ""]
    rows += ["| temperature | accept length | pooled | predicted | requests |", "|---|---|---|---|---|"]
    for key, name in (("t0", "0"), ("t1", "1")):
        part = evaluation.get(key)
        if part:
            values = [
                _number(part.get(k)) for k in ("accept_length", "accept_length_pooled", "predicted_accept_length")
            ]
            rows.append(f"| {name} | {' | '.join(values)} | {part.get('requests', 'not measured')} |")
    rows.append("")
    same = evaluation.get("t0", {}).get("lossless")
    if same:
        rows.append(
            f"Greedy text against plain decoding ({settings.get('dtype', 'unknown precision')}): {same['mismatches']} mismatches "
            f"and {same['ties']} ties on {same['prompts']} prompts."
        )
    return title + "\n" + "\n".join(rows).rstrip()


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "not measured"


def _vocabulary(found: Mapping[str, Any] | None) -> list[str]:
    return [f"| ids proposed | {found['ids']}, {found['share_of_answer_tokens']:.1%} of the answers' tokens |"] if found else []


def _sglang(config: DrafterConfig) -> str:
    algorithm = "DSPARK" if config.kind == "dspark" else "DFLASH"
    headless = config.kind == "dspark" and not config.confidence
    return _serve(
        "With SGLang 0.5.23 or newer on a GPU.",
        f"""python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} \\
    --speculative-draft-model-path THIS_FOLDER --enable-metrics""",
        f"It verifies {config.draft_tokens + 1} tokens a round. Set `--max-running-requests` when you compare speeds: "
        "with a drafter SGLang limits it to 48."
        + (" It has no confidence head: leave SGLANG_RAGGED_VERIFY_MODE at `static`, its default." if headless else ""),
    )


def _vllm(config: DrafterConfig) -> str:
    method = "dspark" if config.kind == "dspark" else "dflash"
    where = "With vLLM 0.32 or newer." if config.kind == "dflash" else "With vLLM 0.32 or newer on a GPU (its model runner V2)."
    return _serve(
        where,
        f"""python -m vllm.entrypoints.openai.api_server --model TARGET --speculative-config \\
    '{{"method": "{method}", "model": "THIS_FOLDER", "num_speculative_tokens": {config.draft_tokens}}}'""",
        "Always name the method: left out, it is guessed from the folder's path.",
    )


def _llamacpp(config: DrafterConfig) -> str:
    kind = "draft-dspark" if config.kind == "dspark" else "draft-dflash"
    return _serve(
        "With llama.cpp b11434 or newer, on CPUs too. TARGET.gguf is the model named in the title, in any format.",
        f"llama-server -m TARGET.gguf -md drafter.gguf --spec-type {kind} --spec-draft-n-max {config.draft_tokens}",
        "Without `--spec-draft-n-max` it drafts 3 tokens a round.",
    )


def _serve(where: str, command: str, note: str) -> str:
    target = "" if "TARGET.gguf" in where else " TARGET is the model named in the title, as a hub id or a folder:"
    return "\n".join(["## Serve it", where + target, "", "```", command, "```", "", note])


def _hf(config: DrafterConfig) -> str:
    note = 'It was exported as plain files (`export.to = "hf"`)'
    if config.taps[-1] == config.target_layers - 1:
        note += " and reads the target's last layer, which SGLang cannot capture for most targets"
    return f"## Serve it\n{note}."


NAMES = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}
LAUNCH = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp, "hf": _hf}
