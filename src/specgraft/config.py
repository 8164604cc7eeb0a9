"""What a run file may say: a pydantic model a section, one section per stage, named as the stage (DESIGN section 2). Loads no torch."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field("pilot", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder of the run, under `root`")
    root: str = Field("runs", description="where runs live")
    seed: int = Field(0, ge=0)
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    threads: int = Field(0, ge=0, description="CPU threads; 0 leaves torch's own choice")


class TargetSection(Section):
    id: str = Field("smollm2", description="`smollm2` (embedded), a Hugging Face folder, or a hub id")
    dtype: Dtype = Field("bfloat16", description="weights and captured states")
    remote_code: bool = Field(False, description="allow code from the hub")
    mask_token_id: int | None = Field(None, ge=0, description="reserved, unused id fed to the block's open slots")


class SourceSection(Section):
    """One source of the mix: `[[prompts.sources]]`."""

    path: str = Field(description="`builtin`, a .jsonl or .parquet file, or `hf:owner/name[:split]` (package `datasets`)")
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="goes in front of the ids; empty: the file's name")
    weight: float = Field(1.0, gt=0, description="share among the sources that hold a cell")
    limit: int = Field(0, ge=0, description="records read at most, the first ones; 0: all")
    language: str = Field("", description="of records that name none")
    domain: str = Field("", description="of records that name none")
    roles: dict[str, Literal["system", "developer", "user", "assistant", "tool"]] = Field(
        {}, description="foreign role names, such as {visitor = \"user\", my-model = \"assistant\"}"
    )

    @property
    def label(self) -> str:
        """The name in front of the ids: as given, else from the path."""
        path = self.path.removeprefix("hf:")
        found = path.replace("/", "-").replace(":", "-") if path != self.path else Path(path).name.removesuffix(Path(path).suffix)
        return self.name or re.sub(r"[^A-Za-z0-9._-]", "-", found)


def band_ends(band: str) -> tuple[int, int | None]:
    """`0-500` -> (0, 500), `500-` -> (500, None). Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+)-(\d*)", band)
    low, high = (int(found[1]), int(found[2]) if found[2] else None) if found else (0, 0)
    if high is not None and high <= low:
        raise ValueError(f"prompts.lengths: {band!r} is no band of lengths; write 0-500, or 500- for everything above")
    return low, high


class PromptsSection(Section):
    source: str = Field("builtin", description="`builtin`, or one JSONL file taken as it is, in its order; `sources` takes its place")
    sources: list[SourceSection] = Field([], description="one or more, mixed by the weights below, cleaned, bad rows listed")
    train: int = Field(480, ge=1, description="prompts to answer for training")
    held_out: int = Field(100, ge=1, description="prompts to answer for evaluation; families never shared with train")
    held_out_share: float = Field(0.1, gt=0, lt=1, description="share of families that are held out, by hash of the name")
    languages: dict[str, Annotated[float, Field(ge=0)]] = {"en": 0.6, "ko": 0.2, "ja": 0.2}
    domains: dict[str, Annotated[float, Field(ge=0)]] = {"chat": 0.4, "code": 0.25, "math": 0.2, "tool": 0.15}
    lengths: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="sources: weights of length bands in characters of all messages, such as {\"0-500\" = 0.5, \"500-\" = 0.5}; empty: as it comes"
    )
    shortfall: Literal["stop", "report"] = Field("stop", description="a quota that cannot be met: refuse, or take what is there and say so")
    near_duplicates: float = Field(0.7, ge=0, le=1, description="sources: of prompts that share this part of their n-grams one is kept; 0: off")
    same_family: float = Field(0.6, ge=0, le=1, description="sources: prompts that share this part are one family, so they never cross the split; 0: off")
    suites: list[str] = Field([], description="sources: JSONL files of benchmark prompts that must not be trained on")
    contamination: Literal["remove", "report", "stop"] = Field("remove", description="a prompt that shares an n-gram with a suite")
    contamination_words: int = Field(13, ge=4, description="words (characters in ko and ja) of that n-gram")
    max_tokens: int = Field(512, ge=8, description="a rendered prompt longer than this is refused")

    @model_validator(mode="after")
    def _mix(self) -> PromptsSection:
        if not self.sources and (self.suites or self.lengths):
            key = "suites" if self.suites else "lengths"
            raise ValueError(f"prompts.{key} needs prompts.sources: write [[prompts.sources]] path = {json.dumps(self.source)}")
        names = [source.label for source in self.sources]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two of prompts.sources are called {double[0]}: give each a `name`, as ids begin with it")
        ends = sorted((low, high or 10**18, band) for band in self.lengths for low, high in [band_ends(band)])
        for (_, high, one), (low, _, other) in pairwise(ends):
            if low < high:
                raise ValueError(f"prompts.lengths: {one} and {other} overlap; the end of a band is not in it, so write 0-500 and 500-")
        if self.near_duplicates and self.same_family > self.near_duplicates:
            raise ValueError(
                f"prompts.same_family={self.same_family} is above prompts.near_duplicates={self.near_duplicates}: near-duplicates are one family, so lower it"
            )
        return self


class SamplingSection(Section):
    """Sampling of one domain: `[regen.by_domain.code]`; what is left out is as in `[regen]`."""

    temperature: float | None = Field(None, ge=0)
    greedy_share: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_new_tokens: int | None = Field(None, ge=2)


class RegenSection(Section):
    temperature: float = Field(1.0, ge=0, description="of the sampled answers")
    greedy_share: float = Field(0.5, ge=0, le=1, description="share of training prompts answered greedily (by hash of the id)")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: no limit")
    max_new_tokens: int = Field(128, ge=2)
    by_domain: dict[str, SamplingSection] = Field({}, description="sampling per domain")
    thinking: Literal["template", "on", "off"] = Field("template", description="enable_thinking of the chat template; `template`: its own default")
    answers: Literal["target", "recorded"] = Field(
        "target", description="`recorded`: the answers of the source are taken as they are (for comparison: the target would not write them)"
    )
    refused: Literal["stop", "skip"] = Field("stop", description="a prompt that the template refuses, or that is too long: stop, or list it and go on")
    cut: Literal["keep", "drop"] = Field("keep", description="answers cut at max_new_tokens")
    batch: int = Field(64, ge=1, description="rows decoded together")
    group: int = Field(192, ge=1, description="prompts per committed file; what a kill can cost in process (servers: nothing)")
    servers: list[str] = Field([], description="URLs of servers of the target; empty: in this process")
    engine: Literal["auto", "sglang", "vllm", "llamacpp"] = Field("auto", description="what the servers are; `auto`: they are asked")
    concurrency: int = Field(16, ge=1, description="requests under way per server")
    timeout: float = Field(300.0, gt=0, description="seconds for one request")
    retries: int = Field(3, ge=0, description="of one request, before the run stops")


class CaptureSection(Section):
    taps: list[int] | Literal["spread"] = Field("spread", description="0-based decoder layers whose outputs are kept")
    tap_count: int = Field(5, ge=1, description="how many, for `spread`")
    dtype: Literal["target", "fp8"] = Field("target", description="of stored states; `fp8`: e4m3 with a scale per token and tap")
    max_length: int = Field(0, ge=0, description="longer conversations are cut behind an answer that still fits; 0: the target's context")
    batch_tokens: int = Field(4096, ge=1, description="tokens per forward pass")
    shard_tokens: int = Field(65536, ge=1, description="tokens per safetensors shard")
    servers: list[str] = Field([], description="URLs of servers that give hidden states (`specgraft serve vllm --taps`); empty: in this process")
    engine: Literal["auto", "vllm", "sglang"] = Field("auto", description="what the servers are; `auto`: they are asked")
    target: Literal["whole", "outer"] = Field(
        "whole", description="with servers: the target is loaded here too, for the gates; `outer`: embedding, head and norm alone, for one that is too large"
    )
    states: str = Field("", description="folder in which vLLM servers leave states, as this machine sees it; empty: the one of `specgraft serve`")
    concurrency: int = Field(16, ge=1, description="requests under way per server")
    timeout: float = Field(300.0, gt=0, description="seconds for one request")
    silence: float = Field(5.0, ge=0, description="a server that works and twice does not say within so many seconds that it is there is given up; 0: it is not asked")
    retries: int = Field(3, ge=0, description="of one request, before the run stops")


OUR_KINDS = ("mtp", "dflash", "dflash2", "dspark")


class DraftersSection(Section):
    kind: str = Field("dspark", description="mtp, dflash, dflash2, dspark (rows of drafters/registry.py)")
    draft_tokens: int = Field(7, ge=1, le=64, description="G: tokens proposed per round")
    layers: int = Field(5, ge=1)
    heads: int = Field(0, ge=0, description="query heads; 0: as the target")
    kv_heads: int = Field(0, ge=0, description="key/value heads; 0: as the target")
    head_dim: int = Field(0, ge=0, multiple_of=2, description="0: as the target")
    intermediate: int = Field(0, ge=0, description="MLP width; 0: as the target")
    layer_types: list[Literal["full_attention", "sliding_attention"]] | Literal["full", "sliding"] = Field(
        "full", description="one per layer, or one word for all"
    )
    sliding_window: int = Field(2048, ge=1, description="context tokens that a sliding layer sees")
    block_causal: bool = Field(False, description="slots of a block see the slots before them only")
    markov_rank: int = Field(256, ge=0, description="dspark; 0: no sequential head")
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = Field(True, description="dspark: a confidence head")
    confidence_with_markov: bool = True
    confidence_detach: bool = Field(False, description="keep the confidence loss out of the trunk")
    conv_group: int = Field(16, ge=1, description="dflash2: channels that share a dynamic kernel")
    selector_rank: int = Field(256, ge=1, description="dflash2")
    selector_top_k: int = Field(16, ge=2, description="dflash2: candidates a slot")
    options: dict[str, Any] = Field({}, description="of a drafter kind that is not ours")
    warm_from: str = Field("", description="folder of another drafter (ours, or a published layout) to start from")
    warm_layers: list[int] | Literal["none", "spread"] = Field(
        "none", description="target layers whose weights start the draft layers, one per draft layer"
    )
    warm_markov: bool = Field(False, description="start the Markov head from token-pair counts of the answers")
    warm_fc: Literal["none", "mean", "last"] = Field("none", description="start `fc` as the mean of the taps, or the last tap")


# What each published recipe minimises (algorithms.md 3.3 to 3.7); `auto` takes the row of the drafter's kind.
PRESETS: dict[str, dict[str, float]] = {
    "dspark": {"ce": 0.1, "l1": 0.9, "confidence": 1.0},
    "dflash": {"ce": 1.0},
    "dflash2": {"ce": 1.0, "selector": 1.0},
    "dflash2_kl": {"kl": 1.0, "selector": 1.0},
    "mtp": {"ce": 1.0},
    "dpace": {"dpace": 1.0, "confidence": 1.0},
    "lk_alpha": {"lk_alpha": 1.0, "confidence": 1.0},
    "lk_hybrid": {"lk_hybrid": 1.0, "confidence": 1.0},
    "ce": {"ce": 1.0, "confidence": 1.0},
    "e2e_tv": {"e2e_tv": 1.0, "confidence": 1.0},
    "specopd": {"e2e_tv": 1.0, "confidence": 1.0},
    "draft_opd": {"confidence": 1.0},
}
# Where the supervised slots of a preset come from; the others learn from the reference answers.
PRESET_SLOTS: dict[str, Literal["branches", "rollouts"]] = {"specopd": "branches", "draft_opd": "rollouts"}
Weight = Annotated[float | None, Field(ge=0)]


class DistillSection(Section):
    preset: Literal[
        "auto", "dspark", "dflash", "dflash2", "dflash2_kl", "mtp", "dpace", "lk_alpha", "lk_hybrid", "ce", "e2e_tv", "specopd", "draft_opd"
    ] = Field("auto", description="starting weights of the objectives; `auto`: those of the drafter's kind. Set a weight to change it")
    slots: Literal["auto", "references", "branches", "rollouts"] = Field(
        "auto",
        description="what the drafter learns from: the answers (`references`), its own proposals on them, scored by the target (`branches`, SpecOPD), or its own draft-verify rounds (`rollouts`, Draft-OPD); `auto`: as the preset",
    )
    ce: Weight = Field(None, description="-log q of the data token")
    kl: Weight = Field(None, description="KL(p||q)")
    rkl: Weight = Field(None, description="KL(q||p)")
    jsd: Weight = Field(None, description="Jensen-Shannon")
    tv: Weight = Field(None, description="half of the sum of |p - q|")
    l1: Weight = Field(None, description="sum of |p - q|, no half")
    lk_alpha: Weight = Field(None, description="-log of the overlap")
    lk_hybrid: Weight = Field(None, description="KL and TV mixed by the overlap")
    dpace: Weight = Field(None, description="cross-entropy with D-PACE weights in place of the decay")
    e2e_tv: Weight = Field(None, description="1 - mean prefix overlap of a block")
    selector: Weight = Field(None, description="dflash2: cross-entropy among the candidates")
    confidence: Weight = Field(None, description="BCE of the confidence head against the overlap")
    lk_eta: float = Field(3.0, ge=0)
    dpace_delta: float = Field(0.5, ge=0, le=1)
    selector_missing: Literal["auto", "mask", "inject"] = Field(
        "auto",
        description="a label outside the candidates: leave the slot out (`mask`, NeMo), or put it in place of the last one (`inject`, speculators: the target's most likely token is the label); `auto`: inject with preset dflash2_kl",
    )
    branch_temperature: float = Field(1.0, ge=1e-3, description="branches: the drafter's own temperature when it samples them")
    branches_per_anchor: int = Field(1, ge=1, description="branches: independent ones at every anchor")
    prefix_weights: Literal["overlap", "exact"] = Field(
        "overlap", description="branches: a slot weighs the overlaps before it, or (ablation) the accept ratios of the tokens before it"
    )
    rollout_rejected: float = Field(1.0, ge=0, description="rollouts: weight of the reverse KL on rejected drafts, beside 1 for the committed ones")
    rollout_decay: float = Field(0.8, gt=0, le=1, description="rollouts: a rejected slot j weighs this to the power j-1")
    rollout_estimator: Literal["full", "token"] = Field("full", description="rollouts: KL over the vocabulary, or the single-token estimators of the published code")
    decay: float = Field(4.0, gt=0, description="gamma_w: slot j weighs exp(-(j-1)/decay)")
    slot_sampling: bool = Field(
        False, description="draw slots with probability exp(-(j-1)/decay) and weight 1 instead of weighing them: same mean gradient, fewer head rows"
    )
    chunk_rows: int = Field(128, ge=1, description="rows of [., vocabulary] held at once")
    fused: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compile the passes over logits (torch.compile; a C++ compiler on a CPU); `auto`: where that is there and a run has 300 steps or more, as compiling takes half a minute",
    )

    def weights(self, kind: str) -> dict[str, float]:
        """Weight of every objective that counts, for this kind of drafter."""
        found = dict(PRESETS.get(kind, {"ce": 1.0}) if self.preset == "auto" else PRESETS[self.preset])
        for name in ("ce", "kl", "rkl", "jsd", "tv", "l1", "lk_alpha", "lk_hybrid", "dpace", "e2e_tv", "selector", "confidence"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return {name: value for name, value in found.items() if value > 0}

    @property
    def origin(self) -> Literal["references", "branches", "rollouts"]:
        """Where the supervised slots come from."""
        return PRESET_SLOTS.get(self.preset, "references") if self.slots == "auto" else self.slots

    def check_origin(self, kind: str) -> None:
        """Raises ValueError for what branches, or rollouts, of this kind of drafter cannot teach, naming the key."""
        mix = set(self.weights(kind))
        if self.preset == "draft_opd" and self.origin != "rollouts" and not mix - {"confidence"}:
            raise ValueError('distill.preset="draft_opd" learns from rollouts: leave distill.slots at "auto", or take another preset')
        if self.origin == "references":
            return
        if self.origin == "rollouts":
            if odd := sorted(mix - {"confidence"}):
                raise ValueError(
                    f'distill.{odd[0]}: rollouts have losses of their own and {", ".join(odd)} is none of them: set distill.preset="draft_opd", or the weight to 0'
                )
            if self.slot_sampling:
                raise ValueError("distill.slot_sampling plays no part in rollouts: set it off")
            return
        if not mix - {"confidence"}:
            raise ValueError('distill: nothing but the confidence would be learnt from branches; set distill.preset="specopd", or give a loss a weight')
        if labelled := [name for name in ("ce", "dpace", "selector") if name in mix]:
            raise ValueError(
                f"distill.{labelled[0]} takes its labels from the text, and branches are the drafter's own tokens: set it to 0 (or "
                'distill.preset="specopd"), or distill.slots="references"'
            )
        if self.slot_sampling:
            raise ValueError("distill.slot_sampling leaves slots out, and branches need all of theirs: set it off")
        if self.prefix_weights == "exact" and self.branch_temperature != 1:
            raise ValueError(
                'distill.prefix_weights="exact" holds for tokens drawn at temperature 1: set distill.branch_temperature=1, or "overlap"'
            )

    def check_losses(self, kind: str, selector: bool, confidence: bool) -> None:
        """Raises ValueError, naming the key, for a mix without sense for this drafter, which drafts by a selector's law, or not,
        and has a confidence head, or not."""
        mix = self.weights(kind)
        key = {name: f"distill.{name}" if getattr(self, name) is not None else f'distill.preset="{self.preset}"' for name in mix}
        if "selector" in mix and not selector:
            raise ValueError(f'{key["selector"]}: a {kind} drafter has no selector; set distill.selector=0, or drafters.kind="dflash2"')
        if "lk_hybrid" in mix and selector:
            raise ValueError(
                f"{key['lk_hybrid']}: lk_hybrid mixes in a KL that is infinite for a selector's law; set distill.lk_hybrid=0, and lk_alpha, or kl and tv, instead"
            )
        if self.origin == "references" and not mix.keys() - ({"confidence"} if not confidence else set()):
            head = ", which has no confidence head" if mix else ""
            raise ValueError(f"distill: nothing to minimise for a {kind} drafter{head}; give a loss a weight, or set distill.preset")

    @property
    def injects(self) -> bool:
        """The selector learns the target's most likely token, put among the candidates where it is missing."""
        return self.selector_missing == "inject" or (self.selector_missing == "auto" and self.preset == "dflash2_kl")

    @model_validator(mode="after")
    def _sampled_slots(self) -> DistillSection:
        whole = {"dpace", "e2e_tv"} & set(self.weights(""))
        if self.slot_sampling and whole:
            raise ValueError(f"distill.slot_sampling leaves slots out and {', '.join(whole)} needs whole blocks: set one of them off")
        return self


class TrainSection(Section):
    steps: int = Field(300, ge=1)
    rows: int = Field(8, ge=1, description="conversations per step, over all ranks")
    accumulate: int = Field(1, ge=1, description="micro-batches that a rank makes of its share of a step: less memory, the same step")
    anchors: int = Field(32, ge=1, description="anchors per conversation and step")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="`muon`: for the trunk's matrices; AdamW for the rest")
    lr: float = Field(6e-4, gt=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup: float = Field(0.04, ge=0, lt=1, description="share of the steps")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    compute: Dtype = Field("bfloat16", description="products; sums, norms and losses stay float32, master weights too")
    max_length: int = Field(1024, ge=8, description="tokens of one conversation seen by the trainer")
    packing: Literal["none", "rows"] = Field("none", description="`rows`: conversations of a step share rows of `row_tokens` tokens")
    row_tokens: int = Field(4096, ge=8, description="tokens of a packed row, at most")
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="under torchrun: every rank has the drafter (`ddp`), or a part of its weights, gradients and moments (`fsdp`)"
    )
    timeout: float = Field(600.0, gt=0, description="under torchrun: seconds after which a rank that does not answer is gone, and the run ends")
    checkpoint_activations: bool = Field(False, description="run draft layers once more in backward in place of keeping what lies inside them")
    compile: bool = Field(False, description="torch.compile of the MLPs of the draft layers")
    checkpoint_every: int = Field(50, ge=1)
    keep: int = Field(2, ge=1, description="checkpoints kept, the newest; the best by `decode_prompts` is kept besides")
    validate_every: int = Field(50, ge=1, description="teacher-forced accept length on held-out")
    validate_rows: int = Field(16, ge=1)
    decode_prompts: int = Field(0, ge=0, description="held-out prompts that are really decoded at every checkpoint; the best checkpoint by that is kept. 0: none")
    tensorboard: bool = Field(False, description="metrics for TensorBoard too, in RUN/tensorboard (package `tensorboard`)")

    @model_validator(mode="after")
    def _rows_hold_conversations(self) -> TrainSection:
        if self.packing == "rows" and self.row_tokens < self.max_length:
            raise ValueError(f"train.row_tokens={self.row_tokens} is less than train.max_length={self.max_length}: raise it, or cut shorter")
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise ValueError('train.optimizer="muon" needs whole matrices and train.parallel="fsdp" has none: set one of them otherwise')
        if self.accumulate > self.rows:
            raise ValueError(f"train.accumulate={self.accumulate} micro-batches of train.rows={self.rows} conversations: lower it")
        return self


class StreamSection(Section):
    """How features come from those who make them to the trainer."""

    medium: Literal["disk", "memory", "hybrid", "ray"] = Field(
        "disk",
        description="`disk`: shards that capture wrote; `memory`: made while training by a thread of this process, nothing written; `hybrid`: made at first use and kept as shards; `ray`: made by actors that hold the target, on this machine or others",
    )
    bound_mb: float = Field(512.0, gt=0, description="megabytes of features made ahead of one trainer rank, at most")
    group: int = Field(1, ge=1, description="rows of a step that share a forward pass where features are made while training; 1: each alone")
    keep: bool = Field(False, description="ray: what was made is kept as shards, as `hybrid` does")
    producers: int = Field(1, ge=1, description="ray: actors, each with the target")
    gpus: float = Field(0.0, ge=0, description="ray: GPUs of a producer")
    cpus: float = Field(1.0, ge=0, description="ray: CPUs of a producer")
    address: str = Field("", description="ray: host:port of a running cluster; empty: one is started on this machine, on loopback, and stopped with the run")
    start_timeout: float = Field(1800.0, gt=0, description="seconds until a producer must have loaded its target")
    timeout: float = Field(300.0, gt=0, description="seconds for one answer of a producer; then it counts as dead")
    retries: int = Field(2, ge=0, description="restarts of a producer that died, and tries of a row after its first; then the run stops")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="a row whose states are broken, or whose shard is damaged: stop, or leave it out and count it (1 % at most)")
    staleness: int = Field(0, ge=0, description="branches: steps by which the drafter that draws them lags behind; the target scores them meanwhile; batches and states of so many steps more wait on the trainer's device")


class EvaluateSection(Section):
    dtype: Dtype = "float32"
    prompts: int = Field(100, ge=1, description="held-out prompts at T=0, compared token by token with plain decoding")
    sampled_prompts: int = Field(32, ge=0, description="held-out prompts at T=1")
    max_new_tokens: int = Field(128, ge=2)
    batch: int = Field(16, ge=1, description="sequences decoded together")
    speed_prompts: int = Field(8, ge=0, description="prompts timed one by one, with and without the drafter")
    speed_dtype: Dtype = "bfloat16"
    examples: int = Field(3, ge=0, description="generations shown in the report")
    schedule: Literal["fixed", "threshold", "prefix", "late"] = Field(
        "fixed", description="drafts verified a round; other than `fixed`: the prompts are decoded once more under it and compared"
    )
    threshold: float = Field(0.3, ge=0, le=1, description="schedule `threshold`: cut at the first calibrated confidence below this")


class ExportSection(Section):
    to: Literal["sglang", "vllm", "llamacpp", "hf"] = Field("sglang", description="the engine; `hf`: plain files without an engine's limits")
    dtype: Dtype = "bfloat16"
    vocabulary: int = Field(0, ge=0, description="vllm, llamacpp: the drafter proposes only that many ids, the answers' commonest; 0: all")
    bundle: bool = Field(False, description="a second folder with the untouched target (linked) and the drafter in it")
    target_gguf: str = Field("", description="llamacpp: the target's .gguf, whose tokenizer is copied; empty: it is written from the target's folder")


class BenchSection(Section):
    engine: Literal["llamacpp", "vllm", "sglang"] = "llamacpp"
    program: str = Field("", description="llama-server, or the python that has vllm or sglang; empty: what `make engines` installed")
    models: dict[str, str] = Field({}, description="the target as the engine loads it, such as {f32 = \"t-f32.gguf\", q8_0 = \"t-q8.gguf\"}; empty: target.id")
    drafters: dict[str, str] = Field({}, description="drafters beside no drafter, such as {dspark = \"runs/a/export\"}; empty: RUN/export")
    suites: dict[str, str] = Field({}, description="JSONL files of prompts by name; empty: the run's held-out prompts")
    prompts: int = Field(8, ge=1, description="of each suite, the first that fit")
    prompt_tokens: int = Field(1024, ge=8, description="longer prompts are passed over; of a recorded history the longest part that fits is taken")
    max_new_tokens: int = Field(64, ge=2)
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0, 1.0], min_length=1)
    concurrency: list[Annotated[int, Field(ge=1)]] = Field([1, 8, 32], min_length=1)
    repeats: int = Field(3, ge=1, description="of every cell; with and without drafters take turns")
    draft_tokens: int = Field(0, ge=0, description="drafts a round; 0: all that the drafter was made for")
    threads: int = Field(0, ge=0, description="of the server; 0: its own choice")
    timeout: float = Field(120.0, gt=0, description="seconds without a piece of an answer, then the run stops")
    start_timeout: float = Field(600.0, gt=0, description="seconds until a server must be healthy")
    alternate: bool = Field(True, description="all servers of one model are up and take turns; false: one after another, for targets that fit once")


class CheckSection(Section):
    engine_agreement: float = Field(0.05, gt=0, description="largest relative difference between the engine's and the decode loop's accept length")
    overfit_steps: int = Field(120, ge=1)
    overfit_tokens: int = Field(64, ge=16)
    agreement: float = Field(0.05, gt=0, description="largest relative difference between predicted and measured accept length")


class RunConfig(Section):
    """Everything one run needs."""

    run: Run = Run()
    target: TargetSection = TargetSection()
    prompts: PromptsSection = PromptsSection()
    regen: RegenSection = RegenSection()
    capture: CaptureSection = CaptureSection()
    drafters: DraftersSection = DraftersSection()
    distill: DistillSection = DistillSection()
    stream: StreamSection = StreamSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    export: ExportSection = ExportSection()
    bench: BenchSection = BenchSection()
    check: CheckSection = CheckSection()

    @model_validator(mode="after")
    def _outer(self) -> RunConfig:
        if self.capture.target == "outer" and not self.capture.servers:
            raise ValueError('capture.target="outer" needs capture.servers: name them, or set it to "whole"')
        if self.capture.target == "outer" and self.drafters.warm_layers != "none":
            raise ValueError('capture.target="outer": the target\'s layers are not loaded; set drafters.warm_layers="none", or capture.target="whole"')
        if self.capture.target == "outer" and self.distill.origin != "references":
            raise ValueError('capture.target="outer": only references can be learnt from without the target; set distill.slots, or capture.target="whole"')
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        part, warm = self.drafters, self.drafters.warm_layers
        self.distill.check_origin(part.kind)
        if self.stream.staleness and self.distill.origin != "branches":
            raise ValueError(f'stream.staleness={self.stream.staleness}: only branches are drawn ahead of their step; set it to 0, or distill.slots="branches"')
        if self.train.parallel == "fsdp" and self.distill.origin == "rollouts":
            raise ValueError('rollouts decode with the whole drafter and train.parallel="fsdp" has none: set train.parallel="ddp"')
        if part.kind in OUR_KINDS:  # another one is asked when it has been built
            self.distill.check_losses(part.kind, part.kind == "dflash2", part.kind == "dspark" and part.confidence)
        if isinstance(part.layer_types, list) and len(part.layer_types) != part.layers:
            raise ValueError(
                f"drafters.layer_types names {len(part.layer_types)} layers for {part.layers} draft layers: give one each, or one word for all"
            )
        if "sliding" in str(part.layer_types) and part.sliding_window <= part.draft_tokens:
            raise ValueError(
                f"drafters.sliding_window={part.sliding_window} must be larger than drafters.draft_tokens={part.draft_tokens}: raise it"
            )
        if isinstance(warm, list) and len(warm) != self.drafters.layers:
            raise ValueError(
                f"drafters.warm_layers names {len(warm)} layers for {self.drafters.layers} draft layers: give one each"
            )
        if part.warm_from and (warm != "none" or part.warm_fc != "none"):
            raise ValueError('drafters.warm_from and drafters.warm_layers or warm_fc start the same weights: set the latter to "none"')
        self.check_stream()
        if self.train.decode_prompts > self.prompts.held_out:
            raise ValueError(f"train.decode_prompts={self.train.decode_prompts} is above prompts.held_out={self.prompts.held_out}: lower it")
        if self.evaluate.prompts > self.prompts.held_out:
            raise ValueError(
                f"evaluate.prompts={self.evaluate.prompts} needs as many prompts.held_out (now {self.prompts.held_out}): raise that, or lower evaluate.prompts"
            )
        return self

    def check_stream(self) -> None:
        """Raises ValueError, naming the key, for settings of the stream that have no sense together."""
        part, origin = self.stream, self.distill.origin
        if self.train.rows % part.group:
            raise ValueError(f"stream.group={part.group}: the rows of a step are made in groups, so it must divide train.rows={self.train.rows}")
        if part.medium == "ray" and origin == "rollouts":
            raise ValueError('stream.medium="ray": rollouts are decoded with the target in this process; set another stream.medium, or distill.slots')
        if part.medium == "ray" and self.drafters.warm_layers != "none":
            raise ValueError('stream.medium="ray": the trainer never loads the target\'s layers; set drafters.warm_layers="none", or another medium')
        if part.keep and part.medium != "ray":
            raise ValueError('stream.keep belongs to stream.medium="ray": set "hybrid" to keep what this process makes, or take it out')
