"""The face that every drafter shows to training and to decoding.

Legend: B rows, T tokens, K taps, D hidden size, N anchors, G draft tokens, W new positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.shared import Shared
from specgraft.ops.sampling import Law

if TYPE_CHECKING:  # these files use this one
    from specgraft.drafters.cache import DraftCache
    from specgraft.drafters.confidence import ConfidenceHead
    from specgraft.drafters.markov import MarkovHead
    from specgraft.drafters.selector import Selector
    from specgraft.drafters.walk import Proposal


@dataclass(frozen=True)
class Texts:
    """Committed text with the target's states; documents may share a row."""

    input_ids: torch.Tensor  # [B, T]
    taps: torch.Tensor  # [B, T, K, D]
    starts: torch.Tensor  # [B, T] where in the row the document of each token starts

    @property
    def positions(self) -> torch.Tensor:
        """[B, T] place of each token in its document."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts


class Drafter(nn.Module, ABC):
    """A draft model without the target's embedding and head, which are shared, frozen and never saved with it.

    The parts behind the trunk are None where a kind has none: then drafts are drawn independently of one another.
    """

    config: DrafterConfig
    fc: nn.Linear  # taps -> hidden; every kind injects the target's states through it
    markov_head: MarkovHead | None
    selector: Selector | None
    confidence_head: ConfidenceHead | None

    @abstractmethod
    def encode(self, shared: Shared, texts: Texts) -> Any:
        """What `states` needs of whole texts, computed once for any number of anchors."""

    @abstractmethod
    def states(self, shared: Shared, texts: Texts, encoded: Any, anchors: torch.Tensor) -> torch.Tensor:
        """h [B,N,G,D] after the final norm for anchors [B,N]; state j-1 proposes the token at a+j.

        A block at anchor a reads taps at positions < a of its own document, the token at a, and nothing else.
        """

    def forward(self, shared: Shared, texts: Texts, anchors: torch.Tensor) -> torch.Tensor:
        """Training forward: h [B,N,G,D] of every block."""
        return self.states(shared, texts, self.encode(shared, texts), anchors)

    @abstractmethod
    def advance(
        self, shared: Shared, cache: DraftCache, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Takes the first counts[b] new positions of cache row rows[b] into the cache (see `DraftCache.append`)."""

    @abstractmethod
    def draft(
        self,
        shared: Shared,
        cache: DraftCache,
        rows: torch.Tensor,
        anchor_ids: torch.Tensor,
        laws: Sequence[Law],
        uniforms: torch.Tensor | None = None,
    ) -> Proposal:
        """Proposes G tokens behind each anchor (see `walk.walk`).

        rows [b] cache rows, ascending and distinct; anchor_ids [b] the last committed token of each, whose position is
        the row's context length; laws [b]; uniforms [b,G] in [0,1), needed where a row is sampled.
        """
