"""A draft vocabulary smaller than the target's: the drafter proposes the commonest ids only, its output matrices shrink with it.

The target verifies every token, so the text does not change; ids that are left out are never proposed, which costs accept length.
Legend: V vocabulary, v draft vocabulary, D hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

OUTPUTS = ("markov_head.markov_w2.weight",)  # drafter matrices with a row per proposed id


@dataclass(frozen=True)
class DraftVocabulary:
    """Which ids are proposed, and the target's head for them. Filled by the caller that has the target."""

    ids: torch.Tensor  # [v] long, rising
    head: torch.Tensor  # [v, D] rows of the target's output matrix
    share: float  # of the counted tokens that these ids cover

    def offsets(self) -> torch.Tensor:
        """[v] long: target id minus draft id, the `d2t` of vLLM and speculators."""
        return self.ids - torch.arange(len(self.ids))

    def member(self, vocabulary: int) -> torch.Tensor:
        """[V] bool: whether a target id is proposed, their `t2d`."""
        found = torch.zeros(vocabulary, dtype=torch.bool)
        found[self.ids] = True
        return found


def commonest(texts: Iterable[Sequence[int]], always: Collection[int], size: int, vocabulary: int) -> tuple[list[int], float]:
    """The `size` commonest ids of some texts, those in `always` (end tokens) among them, rising; and the share of tokens they cover.

    Ids that never occur fill up from the lowest id, which in most tokenizers are the commonest ones. Raises ValueError when
    `always` alone is more than `size`.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    if len(set(always)) > size:
        raise ValueError(f"export.vocabulary={size}: the target's {len(set(always))} end tokens alone are more; raise it")
    order = sorted(range(vocabulary), key=lambda token: (token not in always, -counts[token], token))
    ids = sorted(order[:size])
    total = sum(counts.values())
    return ids, sum(counts[token] for token in ids) / total if total else 0.0


def pruned(tensors: dict[str, torch.Tensor], vocabulary: DraftVocabulary) -> dict[str, torch.Tensor]:
    """The tensors with their output rows cut to the draft vocabulary, and the target's head for it beside them."""
    found = {name: tensor[vocabulary.ids].contiguous() if name in OUTPUTS else tensor for name, tensor in tensors.items()}
    kind = tensors["fc.weight"].dtype
    return found | {"lm_head.weight": vocabulary.head.to("cpu", kind).contiguous()}


def widened(tensors: dict[str, torch.Tensor], vocabulary: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The inverse for reading back: output rows of ids that are never proposed are 0; and the ids [v].

    Raises ValueError when `d2t` and `t2d` do not name the same rising ids.
    """
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise ValueError("d2t: its ids are not rising within the vocabulary")
    if not torch.equal(tensors["t2d"].nonzero()[:, 0], ids):
        raise ValueError("t2d and d2t name different ids")
    found = {}
    for name, tensor in tensors.items():
        if name in OUTPUTS:
            found[name] = tensor.new_zeros(vocabulary, tensor.shape[1])
            found[name][ids] = tensor
        elif name not in ("d2t", "t2d", "lm_head.weight"):
            found[name] = tensor
    return found, ids
