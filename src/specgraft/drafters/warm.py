"""Starting values taken from another drafter, from the target and from the answers' own statistics.

Sources: DFlash2 and DSpark start as the plain trunk they extend (algorithms.md 2.8 and 2.9); layer copies as in layer-dropped self-drafting; the Markov start is a truncated SVD of positive pointwise mutual
information of token pairs (Levy and Goldberg 2014).
Legend: D hidden size, V vocabulary, r Markov rank, P token pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter

ANOTHER_TARGET = ("hidden_size", "vocab_size")
SHAPE = ("layers", "heads", "kv_heads", "head_dim", "intermediate")  # settings of the run that the weights fix
READING = ("eps", "rope_theta", "layer_types", "sliding_window")  # the same weights compute something else
BLOCKS = {"dflash": "own", "dflash2": "own", "dspark": "before"}  # which position's slot proposes a token
HEADS = "heads.weight"  # mtp: one after another, a head for each draft
PARTS = {"attention_conv": "convolutions", "mlp_conv": "convolutions"}


@torch.no_grad()
def start_from(drafter: Drafter, source: Drafter, name: str) -> str:
    """Copies every tensor of `source` that has a place in `drafter`; the rest keeps its starting values. Returns a line
    that says what was copied, whether the drafter now computes exactly what the source did, and what is new.

    Exact: the same kind; DSpark from a DSpark trunk with another head or none; DFlash2 from DFlash. Raises ValueError, in
    one line, where the source's weights mean nothing here: another target, other taps, other shapes.
    """
    own, theirs = drafter.config, source.config
    refuse(own, theirs, name)
    values, wanted = source.state_dict(), drafter.state_dict()
    copied = {part: tensor for part, tensor in values.items() if part in wanted and fits(part, own, theirs)}
    copied = {part: tensor for part, tensor in copied.items() if part == HEADS or tensor.shape == wanted[part].shape}
    for part, tensor in copied.items():
        if part == HEADS:
            tensor = torch.cat([tensor, wanted[part][len(tensor) :]])[: len(wanted[part])]
        wanted[part].copy_(tensor)
    reasons = differences(own, theirs)
    how = f"approximately ({'; '.join(reasons)})" if reasons else "exactly"
    found = f"{name} ({theirs.kind}): {parts_of(copied)} copied {how}"
    for what, names in (("new", set(wanted) - set(copied)), ("left behind", set(values) - set(copied))):
        found += f"; {what}: {parts_of(names)}" if names else ""
    if HEADS in copied and theirs.draft_tokens < own.draft_tokens:
        found += f"; new: heads {theirs.draft_tokens + 1} to {own.draft_tokens}"
    return found


def refuse(own: DrafterConfig, theirs: DrafterConfig, name: str) -> None:
    """Raises ValueError for the first thing that keeps the weights of one drafter out of the other."""
    fields = ANOTHER_TARGET + (("target_layers",) if own.target_layers and theirs.target_layers else ())
    for field in fields:
        if getattr(own, field) != getattr(theirs, field):
            raise ValueError(
                f"drafters.warm_from: {name} has {field}={getattr(theirs, field)} and this target {getattr(own, field)}: it was "
                "made for another target"
            )
    if own.taps != theirs.taps:
        raise ValueError(
            f"drafters.warm_from: {name} reads target layers {list(theirs.taps)}, this run {list(own.taps)}; set "
            f"capture.taps={list(theirs.taps)} and capture again"
        )
    for field in SHAPE + (("conv_group",) if own.kind == theirs.kind == "dflash2" else ()):
        if getattr(own, field) != getattr(theirs, field):
            raise ValueError(
                f"drafters.warm_from: {name} has {field}={getattr(theirs, field)}, this run {getattr(own, field)}; "
                f"set drafters.{field}={getattr(theirs, field)}"
            )


def fits(name: str, own: DrafterConfig, theirs: DrafterConfig) -> bool:
    """Whether a tensor that both drafters have means the same in both. Heads are copied whole or not at all."""
    markov = (own.markov_rank, own.markov_head) == (theirs.markov_rank, theirs.markov_head)
    if name.startswith("markov_head."):
        return markov
    if name.startswith("confidence_head."):
        reads = {c.confidence_with_markov and c.markov_rank > 0 for c in (own, theirs)}
        return len(reads) == 1 and (markov or reads == {False})
    if name.startswith("candidate_selector."):
        return own.selector_rank == theirs.selector_rank
    return True


def differences(own: DrafterConfig, theirs: DrafterConfig) -> list[str]:
    """Why the copied weights do not compute what they did; empty where they do."""
    found = []
    blocks = own.kind in BLOCKS and theirs.kind in BLOCKS
    if blocks and BLOCKS[own.kind] != BLOCKS[theirs.kind]:
        found.append("labels move by one slot")
    elif not blocks and own.kind != theirs.kind:
        found.append(f"{theirs.kind} and {own.kind} run their layers over other inputs")
    if theirs.conv_group and not own.conv_group:
        found.append("its convolutions have no place here")
    fields = READING + (("block_causal", "mask_token_id") if blocks else ())
    if blocks and not (own.block_causal and theirs.block_causal):
        fields += ("draft_tokens",)  # slots see later slots
    for field in fields:
        if getattr(own, field) != getattr(theirs, field):
            found.append(f"{field} {plain(getattr(theirs, field))} there, {plain(getattr(own, field))} here")
    return found


def plain(value: object) -> str:
    return " ".join(str(item).removesuffix("_attention") for item in value) if isinstance(value, tuple) else str(value)


def parts_of(names: Iterable[str]) -> str:
    """The parts that these tensors make up: `fc, layers, norm`."""
    split = [name.split(".") for name in names]
    return ", ".join(sorted({next((PARTS[word] for word in words if word in PARTS), words[0]) for words in split}))


@torch.no_grad()
def copy_layers(drafter: Drafter, sources: Sequence[nn.Module], final_norm: nn.Module) -> None:
    """Draft layer i starts as `sources[i]`, a decoder layer of the target with the same shapes.

    The draft layers norm queries and keys and the target's may not: the norm weights start at the size that the target's
    own projections give on average. `hidden_norm` starts as the mean of the copied input norms, `norm` as the final norm.
    Raises ValueError where shapes differ.
    """
    assert len(sources) == drafter.config.layers
    for index, source in enumerate(sources):
        layer = drafter.get_submodule(f"layers.{index}")
        values = source.state_dict()
        wanted = layer.state_dict()
        needed = {name for name in wanted if name.startswith(("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm."))}
        if absent := sorted(needed - set(values) - {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}):
            raise ValueError(
                f"drafters.warm_layers: layer {index} of those named has no {absent[0]} in the target (another kind of layer); "
                'name attention layers with plain MLPs, or set it to "none"'
            )
        for name, tensor in wanted.items():
            if name in values and values[name].shape != tensor.shape:
                raise ValueError(
                    f"drafters.warm_layers: layer {index} {name} is {tuple(values[name].shape)} in the target and "
                    f"{tuple(tensor.shape)} in the drafter; leave heads, head_dim and intermediate at 0, or set it to \"none\""
                )
            if name in values:
                tensor.copy_(values[name])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            if f"self_attn.{norm}.weight" not in values:
                size = _typical_size(values[f"self_attn.{projection}.weight"], values["input_layernorm.weight"])
                layer.get_parameter(f"self_attn.{norm}.weight").fill_(size)
    norms = torch.stack([source.state_dict()["input_layernorm.weight"].float() for source in sources])
    drafter.get_parameter("hidden_norm.weight").copy_(norms.mean(0))
    drafter.get_parameter("norm.weight").copy_(final_norm.state_dict()["weight"])


def _typical_size(projection: torch.Tensor, norm: torch.Tensor) -> float:
    """Root mean square of `projection @ x` for x with independent entries of the size that the norm leaves."""
    return float(((projection.float() * norm.float()) ** 2).sum(1).mean().sqrt())


@torch.no_grad()
def start_fc(drafter: Drafter, how: str) -> None:
    """`fc` starts as the mean of the taps ("mean") or as the deepest tap ("last"), plus its small random values."""
    size, count = drafter.config.hidden_size, len(drafter.config.taps)
    eye = torch.eye(size)
    for tap in range(count):
        share = 1 / count if how == "mean" else float(tap == count - 1)
        drafter.fc.weight[:, tap * size : (tap + 1) * size] += share * eye


def no_pairs_for(drafter: Drafter) -> str:
    """Why pair counts cannot start this drafter's sequential head, or nothing."""
    if drafter.markov_head is None:
        return f"this {drafter.config.kind} drafter has no Markov head"
    if drafter.config.markov_head == "rnn":  # its bias is no product of the two tables: the fit would be noise
        return "the rnn head reads W1 through its recurrence"
    return ""


@torch.no_grad()
def start_markov(drafter: Drafter, before: torch.Tensor, after: torch.Tensor, scale: float = 0.5) -> None:
    """W2 W1^T starts as a rank-r fit of the positive mutual information of token pairs.

    before, after [P]: neighbouring tokens of the answers. Entry (a, b) is max(0, log(n_ab n / (n_a n_b))), damped for rare
    pairs by n_ab / (n_ab + 1). For drafters where `no_pairs_for` finds no reason against it.
    """
    head = drafter.markov_head
    assert head is not None and not no_pairs_for(drafter)
    vocab, rank = drafter.config.vocab_size, drafter.config.markov_rank
    pairs, counts = torch.unique(before * vocab + after, return_counts=True)
    left, right = pairs // vocab, pairs % vocab
    n = counts.float()
    n_left = torch.zeros(vocab).index_add_(0, left, n)
    n_right = torch.zeros(vocab).index_add_(0, right, n)
    value = (n.log() + n.sum().log() - n_left[left].log() - n_right[right].log()).clamp(min=0) * n / (n + 1)
    matrix = torch.sparse_coo_tensor(torch.stack([right, left]), value, (vocab, vocab), check_invariants=True).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=min(rank, vocab), niter=4)
    root = (scale * s).sqrt()
    width = u.shape[1]
    head.markov_w2.weight[:, :width] = u * root
    head.markov_w1.weight[:, :width] = v * root
