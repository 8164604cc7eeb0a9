"""Hidden states of conversations: one prefill, hooks on the tapped layers.

Legend: B batch, T tokens, K taps, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.records import Conversation, Features
from specgraft.targets.model import Target


def spread_taps(layers: int, count: int) -> list[int]:
    """`count` layer ids spread over depth, at most L-3 (z-lab's rule; algorithms.md 2.1).

    Raises ValueError when that many distinct layers do not fit.
    """
    ids = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    if ids != sorted(set(ids)) or ids[0] < 0:
        fit = len(range(1, max(layers - 2, 2)))
        raise ValueError(f"capture.tap_count={count}: a target of {layers} layers has room for {fit} spread taps")
    return ids


def resolve_taps(taps: Sequence[int] | str, count: int, layers: int) -> list[int]:
    """The tap list of a run. Raises ValueError for ids that are absent, repeated or unsorted."""
    ids = spread_taps(layers, count) if isinstance(taps, str) else list(taps)
    if not ids:
        raise ValueError("capture.taps is empty: name at least one layer")
    if ids != sorted(set(ids)):
        raise ValueError(f"capture.taps={ids}: name each layer once, in rising order")
    if ids[0] < 0 or ids[-1] >= layers:
        raise ValueError(f"capture.taps={ids}: the target's decoder layers are 0 to {layers - 1}")
    return ids


def capture_batch(target: Target, conversations: Sequence[Conversation], taps: Sequence[int]) -> list[Features]:
    """Features of a batch in one pass, in the order given. Right padding is never seen by a real token."""
    lengths = [len(conversation.input_ids) for conversation in conversations]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, conversation in enumerate(conversations):
        ids[row, : lengths[row]] = torch.tensor(conversation.input_ids)
    step = target.forward(ids.to(target.device), target.cache(len(lengths), max(lengths)), taps)
    assert step.taps is not None
    return [
        Features(
            prompt_id=conversation.prompt_id,
            input_ids=ids[row, : lengths[row]],
            loss_mask=torch.tensor(conversation.loss_mask),
            taps=step.taps[row, : lengths[row]],
            last=step.last[row, : lengths[row]],
        )
        for row, conversation in enumerate(conversations)
    ]


def fault_of(features: Features) -> str | None:
    """Why these features must not be trained on, or None: values that are not finite, or a tap that is all zero."""
    for name, states in (("taps", features.taps), ("last", features.last)):
        if not torch.isfinite(states).all():
            return f"{name} not finite"
        if (states.abs().amax(-1) == 0).any():
            return f"{name} all zero at a token"
    return None
