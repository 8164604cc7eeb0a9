"""The attention function that every Hugging Face attention layer of a target calls.

Legend: B rows and L tokens of a pass, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from specgraft.targets.parts import Heads, Part, Work

NAME = "specgraft"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    work: Work | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B,H,L,d], key and value [B,Hk,L,d] of the tokens of this pass -> [B,L,H,d].

    What is visible is the parts' business (`targets.parts`); the mask that transformers passes is a placeholder.
    """
    assert work is not None, "a pass of the target goes through targets.model.Target"
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attend(part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return part.attend(layer, Heads(q, k, v, scale, sliding_window or 0, s_aux))

    return work.run(attend, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


AttentionInterface.register(NAME, attention)
