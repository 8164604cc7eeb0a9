"""Gate "tap identity": a captured tap is the output of the layer whose id it bears, and of no other.

Legend: T tokens, K taps, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specgraft.check.reference import exact, plain_pass, whole
from specgraft.records import Conversation, Features, GateResult
from specgraft.targets.model import Target

ROWS = 3
COSINE = 0.999  # mean over tokens, in half precision
NORM = 0.03  # mean relative difference of norms, in half precision
WORST = 0.95  # cosine of the worst token
EXACT_COSINE, EXACT_NORM = 0.99999, 1e-3  # in float32 and wider
FP8_COSINE = 0.9985  # e4m3 takes 0.00034 (relative error 0.026) from what half precision leaves


@dataclass(frozen=True)
class Likeness:
    """A captured state against one reference state. Filled by `likeness`."""

    cosine: float  # mean over tokens
    worst: float  # lowest cosine of a token
    norm: float  # mean of | |captured| / |reference| - 1 |


def likeness(captured: torch.Tensor, reference: torch.Tensor) -> Likeness:
    """Token by token, [T,D] both."""
    a, b = captured.double().to(reference.device), reference.double()
    cosine = F.cosine_similarity(a, b, dim=-1)
    norm = (a.norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-30) - 1).abs()
    return Likeness(float(cosine.mean()), float(cosine.min()), float(norm.mean()))


def tap_identity(
    target: Target,
    capture: Callable[[Conversation], Features],
    conversations: Sequence[Conversation],
    taps: Sequence[int],
    stored: str = "target",
) -> GateResult:
    """Compares every tap, and the last layer's state, on three rows of different length with hooks of the gate's own.

    `capture` gives Features of a conversation as training reads them (from shards, or captured anew). Each state must be
    nearest to its own layer: of the same direction and of the same size (which a norm applied to it would change), and
    nearer than to the layers beside it. `stored` is the dtype that states were kept in ("fp8", or the target's).
    """
    if not whole(target):
        return GateResult("tap identity", False, "not run: the target's layers are not loaded here, so nothing can be compared with them")
    rows = different_lengths(conversations)
    if not rows:
        return GateResult("tap identity", False, "not run: no conversations")
    faults: list[str] = []
    low, high_norm, beside = 1.0, 0.0, -1.0
    for conversation in rows:
        features = capture(conversation)
        if fault := shape_fault(conversation, features, len(taps)):
            faults.append(f"{conversation.prompt_id}: {fault}")
            continue
        plain = plain_pass(target, conversation.input_ids)
        merged = [mean_of_streams(layer, target.streams) for layer in plain.layers]
        states = [(f"tap {tap}", tap, features.taps[:, place], merged) for place, tap in enumerate(taps)]
        states.append(("last", target.num_layers - 1, features.last, plain.layers))
        for name, layer, state, layers in states:
            own = likeness(state, layers[layer + 1])
            near = [likeness(state, other).cosine for other in neighbours(layers, layer)]
            low, high_norm, beside = min(low, own.cosine), max(high_norm, own.norm), max(beside, *near)
            if fault := state_fault(own, near, *limits(target, stored)):
                faults.append(f"{name} of {conversation.prompt_id}: {fault}{looks_like(target, state, layers, layer)}")
    measured = {"rows": float(len(rows)), "cosine": low, "norm_error": high_norm, "neighbour_cosine": beside}
    if faults:
        more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
        return GateResult("tap identity", False, faults[0] + more, measured)
    lengths = ", ".join(str(len(c.input_ids)) for c in rows)
    return GateResult(
        "tap identity",
        True,
        f"{len(taps)} taps and the last layer on rows of {lengths} ids: lowest cosine {low:.5f}, neighbours at most "
        f"{beside:.5f}, norms within {high_norm:.2%}",
        measured,
    )


def different_lengths(conversations: Sequence[Conversation], count: int = ROWS) -> list[Conversation]:
    """Up to `count` conversations of distinct length, from the shortest to the longest."""
    by_length = {len(c.input_ids): c for c in reversed(conversations)}
    lengths = sorted(by_length)
    if len(lengths) <= count:
        return [by_length[length] for length in lengths]
    return [by_length[lengths[round(i * (len(lengths) - 1) / (count - 1))]] for i in range(count)]


def shape_fault(conversation: Conversation, features: Features, taps: int) -> str | None:
    """Rows and taps must be as many as ids and layers; what is missing cannot be compared."""
    if features.input_ids.tolist() != conversation.input_ids:
        return "the features' ids are not the conversation's"
    length = len(conversation.input_ids)
    if features.taps.shape[:2] != (length, taps) or features.last.shape[0] != length:
        return f"{tuple(features.taps.shape[:2])} taps and {features.last.shape[0]} last states for {length} ids and {taps} layers"
    if not torch.isfinite(features.taps).all() or not torch.isfinite(features.last).all():
        return "states are not finite"
    return None


def mean_of_streams(output: torch.Tensor, streams: int) -> torch.Tensor:
    """What a tap holds of a layer's output [T, streams * D]: [T, D]."""
    return torch.stack(output.chunk(streams, -1)).mean(0) if streams > 1 else output


def neighbours(layers: Sequence[torch.Tensor], layer: int) -> list[torch.Tensor]:
    """States of the layer before (the embeddings, for layer 0) and of the layer behind, where there is one."""
    return [layers[place] for place in (layer, layer + 2) if place < len(layers)]


def limits(target: Target, stored: str) -> tuple[float, float]:
    """Least cosine and largest difference of norms that states kept in this dtype may have."""
    if exact(target, stored):
        return EXACT_COSINE, EXACT_NORM
    return FP8_COSINE if stored == "fp8" else COSINE, NORM


def state_fault(own: Likeness, near: Sequence[float], cosine: float, norm: float) -> str | None:
    """Why a state is not its layer's, or None."""
    if own.cosine < cosine:
        return f"cosine with its own layer is {own.cosine:.5f} (at least {cosine})"
    if own.worst < WORST:
        return f"cosine of its worst token with its own layer is {own.worst:.5f} (at least {WORST})"
    if own.norm > norm:
        return f"its size differs from its own layer's by {own.norm:.2%} (at most {norm:.1%})"
    if max(near) >= own.cosine:
        return f"a neighbouring layer is as near: cosine {max(near):.5f}, its own {own.cosine:.5f}"
    return None


@torch.inference_mode()
def looks_like(target: Target, state: torch.Tensor, layers: Sequence[torch.Tensor], layer: int) -> str:
    """What a wrong state is, when that can be told: its layer behind the final norm, or another layer."""
    own = layers[layer + 1]
    normed = likeness(state, target.final_norm(own)) if target.streams == 1 else None
    if normed is not None and normed.cosine > COSINE and normed.norm < NORM:
        return "; it looks like its own layer with the final norm applied"
    names = ["the embeddings", *(f"layer {i}" for i in range(target.num_layers))]
    every = [likeness(state, reference).cosine for reference in layers]
    best = max(range(len(every)), key=every.__getitem__)
    return f"; it looks like {names[best]} (cosine {every[best]:.5f})" if best != layer + 1 else ""
