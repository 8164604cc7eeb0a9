"""Sequential heads: a low-rank bias on the logits of draft j from the token before it (DSpark eqs. 4 to 6; algorithms.md 2.9).

Legend: B rows, G draft tokens, D hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig

State = torch.Tensor | None  # [B, r] of the rnn head, None for the others


class MarkovHead(nn.Module):
    """bias_j = W2 latent_j, with e = W1[x_{a+j-1}] and latent e (`vanilla`), sigma(G[h;e]) * e (`gated`) or a gated
    recurrence over the slots (`rnn`). Starts at no bias: W2 is zero."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        vocab, rank, hidden = config.vocab_size, config.markov_rank, config.hidden_size
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        elif self.kind != "vanilla":
            raise ValueError(f"drafters.markov_head={self.kind!r}: known are vanilla, gated, rnn")
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)
        for name in ("gate_proj", "joint_proj"):
            if hasattr(self, name):
                nn.init.normal_(getattr(self, name).weight, std=0.02)
                nn.init.zeros_(getattr(self, name).bias)

    @property
    def reads_token_only(self) -> bool:
        """The latent is a function of the token before alone: equal tokens share it."""
        return self.kind == "vanilla"

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """e [.., r] of the tokens before each draft."""
        return self.markov_w1(previous)

    def step(self, hidden: torch.Tensor, embedded: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Latent [.., r] of one slot from h [.., D], e [.., r] and what the slots before it left."""
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded.to(hidden.dtype)], -1))) * embedded, None
        # the state stays in the dtype of h: a half-precision table must not round it slot after slot
        before = hidden.new_zeros(embedded.shape) if state is None else state
        gate, new, out = self.joint_proj(torch.cat([before, embedded.to(hidden.dtype), hidden], -1)).chunk(3, -1)
        keep = torch.sigmoid(gate)
        after = keep * before + (1 - keep) * torch.tanh(new)
        return torch.tanh(out), after

    def latents(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Latents [..,G,r] of h [..,G,D] with given previous tokens: the walk of `step` over the slots."""
        if self.kind != "rnn":
            return self.step(hidden, embedded, None)[0]
        out: list[torch.Tensor] = []
        state: State = None
        for slot in range(hidden.shape[-2]):
            latent, state = self.step(hidden[..., slot, :], embedded[..., slot, :], state)
            out.append(latent)
        return torch.stack(out, -2)

    def bias(self, latent: torch.Tensor) -> torch.Tensor:
        """float32 (float64) bias [.., V]."""
        out = self.markov_w2(latent)
        return out if out.dtype == torch.float64 else out.float()


class BiasRows:
    """Rows W2 W1[y] of a vanilla head, remembered by token y on the CPU.

    A walk reads all of W2 for every draft, as much memory as half the target at small vocabularies; text repeats its
    tokens, and a remembered row is W2's share of one token. The rows are the very values the product gave. They are
    forgotten when the head's weights change, the oldest used ones when `limit` bytes are full.
    """

    def __init__(self, head: MarkovHead, limit: int = 256 << 20) -> None:
        self.head, self.limit = head, limit
        self.rows: dict[int, torch.Tensor] = {}
        self.state: tuple[int, ...] = ()

    def __call__(self, previous: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Bias [B,V] of tokens previous [B] with latents [B,r]; a tensor of its own that may be written to."""
        if previous.is_cuda or not self.head.reads_token_only:  # there a product costs less than the look-up
            return self.head.bias(latent)
        state = tuple(
            number
            for weight in (self.head.markov_w1.weight, self.head.markov_w2.weight)
            for number in (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        )
        if state != self.state:
            self.rows, self.state = {}, state
        ids = previous.tolist()
        missing = [place for place, token in enumerate(ids) if token not in self.rows]
        if missing:
            fresh = self.head.bias(latent[missing] if len(missing) < len(ids) else latent)
            for place, row in zip(missing, fresh, strict=True):
                self.rows[ids[place]] = row.clone()
        out = torch.stack([self.rows[token] for token in ids])
        for token in ids:  # to the end: least recently used first
            if token in self.rows:
                self.rows[token] = self.rows.pop(token)
        while self.rows and len(self.rows) * out.shape[1] * 4 > self.limit:
            del self.rows[next(iter(self.rows))]
        return out
