"""From block states to drafts, left to right: every draft knows the drafts before it (algorithms.md 2.8, 2.9, 2.11).

Legend: B rows of this call, D hidden size, G draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specgraft.drafters.drafter import Drafter
from specgraft.drafters.markov import BiasRows
from specgraft.drafters.shared import Shared
from specgraft.ops.sampling import Law, distributions, draw


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round. Filled by `walk`."""

    tokens: torch.Tensor  # [B, G] d_1..d_G
    q: torch.Tensor | None  # [B, G, V] float32, the law each draft was drawn from; None where every row is greedy
    confidence: torch.Tensor | None  # [B, G] logits that draft j is accepted, given that the drafts before it were


class Corrector:
    """Logits of draft j given the token before it, whatever the drafter's kind; one object a walk."""

    def __init__(self, drafter: Drafter, bias: BiasRows | None = None) -> None:
        self.drafter = drafter
        self.bias = bias
        self.state: torch.Tensor | None = None

    def __call__(self, base: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """base [B,V] = W_lm h and h [B,D] of this slot, previous [B] -> logits [B,V] of the law, confidence logits [B]."""
        drafter, embedded = self.drafter, None
        if drafter.markov_head is not None:
            embedded = drafter.markov_head.embed(previous)
            latent, self.state = drafter.markov_head.step(hidden, embedded, self.state)
            bias = self.bias(previous, latent) if self.bias is not None else drafter.markov_head.bias(latent)
            logits = bias.add_(base)
        elif drafter.selector is not None:
            logits = drafter.selector.logits(base, hidden, previous)
        else:
            logits = base if base.dtype == torch.float64 else base.float()
        if drafter.confidence_head is None:
            return logits, None
        return logits, drafter.confidence_head(hidden, embedded)


def base_logits(shared: Shared, hidden: torch.Tensor) -> torch.Tensor:
    """U = W_lm h, [.., V], in the head's dtype."""
    return torch.nn.functional.linear(hidden.to(shared.head.dtype), shared.head)


def walk(
    drafter: Drafter,
    shared: Shared,
    hidden: torch.Tensor,
    anchor_ids: torch.Tensor,
    laws: Sequence[Law],
    uniforms: torch.Tensor | None = None,
    bias: BiasRows | None = None,
) -> Proposal:
    """Drafts G tokens from states hidden [B,G,D] behind anchors [B]; uniforms [B,G] where a row is sampled."""
    greedy = all(law.temperature == 0 for law in laws)
    assert greedy or uniforms is not None, "sampled rows need uniforms"
    base = base_logits(shared, hidden)
    correct = Corrector(drafter, bias)
    previous, tokens, law_rows, confidence = anchor_ids, [], [], []
    for slot in range(hidden.shape[1]):
        logits, sure = correct(base[:, slot], hidden[:, slot], previous)
        if sure is not None:
            confidence.append(sure)
        if greedy:
            previous = logits.argmax(-1)
        else:
            assert uniforms is not None
            law_rows.append(distributions(logits, laws))
            previous = draw(law_rows[-1], uniforms[:, slot])
        tokens.append(previous)
    q = None if greedy else torch.stack(law_rows, 1)
    return Proposal(torch.stack(tokens, 1), q, torch.stack(confidence, 1).float() if confidence else None)
