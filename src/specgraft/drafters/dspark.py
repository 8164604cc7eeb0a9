"""DSpark: a parallel block over injected target states, a low-rank Markov correction, a confidence head.

Sources: DSpark paper eqs. 4 to 8, DeepSpec; layout and alignment as algorithms.md 2.2 to 2.10.
Legend: B batch, N blocks, G draft tokens, T tokens, K taps, D hidden size, V vocabulary, r Markov rank.
"""

from __future__ import annotations

import torch
from torch import nn

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.layers import Layer, RMSNorm, rope_tables

ContextKV = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values [B, T, Hk, d]


class MarkovHead(nn.Module):
    """Bias of draft j from the token before it: W2 W1[x_{a+j-1}], rank r (`vanilla`)."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)  # starts as the plain trunk


class ConfidenceHead(nn.Module):
    """Logit that draft j is accepted, given that the drafts before it were; never reads draft j itself. float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = x if self.proj.weight.dtype == torch.float64 else x.float()
            return self.proj(wide)[..., 0]


class DSpark(nn.Module):
    """The drafter without the target's embedding and head, which are shared, frozen and never saved with it.

    Parameter names are those of contracts/sglang.md 2.3.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.eps)
        self.layers = nn.ModuleList(
            Layer(c.hidden_size, c.heads, c.kv_heads, c.head_dim, c.intermediate, c.eps) for _ in range(c.layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.markov_head = MarkovHead(c.vocab_size, c.markov_rank)
        self.confidence_head = ConfidenceHead(c.hidden_size + (c.markov_rank if c.confidence_with_markov else 0))

    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> ContextKV:
        """Keys and values that blocks read, one pair a layer, from taps [B,T,K,D] at positions [B,T]."""
        states = self.hidden_norm(self.fc(taps.flatten(-2)))
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.keys_values(states, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def block(
        self, anchor_states: torch.Tensor, mask_state: torch.Tensor, anchors: torch.Tensor, context: ContextKV, visible: torch.Tensor
    ) -> torch.Tensor:
        """States h [B,N,G,D] after the final norm; state j-1 proposes the token at a+j.

        anchor_states [B,N,D] embeddings of x_a, mask_state [D] of the mask token, anchors [B,N] positions a,
        visible [B,N,T] context tokens each block may read (positions < a only).
        """
        size = self.config.draft_tokens
        slots = torch.arange(size, device=anchors.device)
        x = torch.where(slots[:, None] == 0, anchor_states[:, :, None, :], mask_state)
        cos, sin = rope_tables(anchors[..., None] + slots, self.config.head_dim, self.config.rope_theta)
        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, pair, visible, cos, sin)
        return self.norm(x)

    def embed_previous(self, previous: torch.Tensor) -> torch.Tensor:
        """Markov embedding e [.., r] of the tokens before each draft."""
        return self.markov_head.markov_w1(previous)

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Confidence logits [..] from h [..,D] and e [..,r]."""
        if self.config.confidence_detach:
            hidden, embedded = hidden.detach(), embedded.detach()
        return self.confidence_head(torch.cat([hidden, embedded], -1) if self.config.confidence_with_markov else hidden)
