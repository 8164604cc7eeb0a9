"""The accept rule of a batch whose rows have laws of their own, on what one pass of the target gave.

Legend: B rows, W width of a pass, N tokens of a pass, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specgraft.decode.verify import verify_greedy, verify_sampled
from specgraft.drafters.walk import Proposal
from specgraft.ops.sampling import Law, distributions


@dataclass(frozen=True)
class Seen:
    """What a pass of the target over N tokens gives."""

    logits: torch.Tensor  # [N, V]
    place: torch.Tensor  # [B, W] in 0..N-1: the anchor of each row and its drafts; the last one again behind them
    taps: torch.Tensor  # [B, W, K, D]
    last: torch.Tensor | None = None  # [B, W, D]; None where the pass was packed

    def distributions(self, laws: Sequence[Law], some: list[int]) -> torch.Tensor:
        """p [b,W,V] of these rows; laws [B] of all."""
        if self.place.numel() == len(self.logits):  # nothing is packed, nothing is copied
            logits = self.logits.view(*self.place.shape, -1)
            return distributions(logits[some] if len(some) < len(logits) else logits, [laws[number] for number in some])
        owner = torch.empty(len(self.logits), dtype=torch.long, device=self.place.device)
        owner[self.place] = torch.arange(len(self.place), device=self.place.device)[:, None]
        return distributions(self.logits, [laws[number] for number in owner.tolist()])[self.place[some]]


def judge(
    seen: Seen, lengths: Sequence[int], proposal: Proposal, laws: Sequence[Law], sampled: list[int], level: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts [B] and the token behind them [B], of the first lengths[b] drafts of each row, a row at its own law.

    `sampled` rows are at a temperature above 0; level [len(sampled), G+1] are their uniforms: a test a draft, then the draw.
    """
    device = proposal.tokens.device
    verified = None if min(lengths) == proposal.tokens.shape[1] else torch.tensor(lengths, device=device)
    accepted, following = verify_greedy(seen.logits.argmax(-1)[seen.place], proposal.tokens, verified)
    if sampled:
        assert proposal.q is not None and level is not None
        some = torch.tensor(sampled, device=device)
        p = seen.distributions(laws, sampled)
        accepted[some], following[some] = verify_sampled(
            p, proposal.q[some], proposal.tokens[some], level[:, :-1], level[:, -1], None if verified is None else verified[some]
        )
    return accepted, following
