"""DFlash2: DFlash with convolutions over the slots of a block and a selector among each slot's candidates.

Sources: z-lab dflash and the DFlash2 announcement; layout as algorithms.md 2.8. The block is DFlash's: [x_a, mask x G].
Legend: B rows, N blocks, S slots a block, G draft tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from specgraft.drafters.cache import DraftCache
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.convolution import BlockConvolution
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.layers import MLP, Attention, RMSNorm
from specgraft.drafters.selector import Selector
from specgraft.drafters.shared import Shared
from specgraft.drafters.trunk import Pairs, Trunk
from specgraft.drafters.walk import Proposal, walk
from specgraft.ops.block_attention.spans import Spans
from specgraft.ops.sampling import Law


class DFlash2Layer(nn.Module):
    """A draft layer whose two sublayers are each wrapped in a convolution; context states are not convolved."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.attention_conv = BlockConvolution(config.hidden_size, config.conv_group)
        self.mlp_conv = BlockConvolution(config.hidden_size, config.conv_group)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        spans: Spans,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """As `layers.Layer`: x [B,N,S,D] -> [B,N,S,D]."""
        x = x + self.attention_conv(self.input_layernorm(x), lambda u: self.self_attn(u, context, spans, cos, sin))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class DFlash2(Drafter):
    """Parameter names are those of contracts/sglang.md 2.3."""

    candidate_selector: Selector

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = Trunk(config, DFlash2Layer, idle=1)
        self.fc, self.hidden_norm, self.layers, self.norm = self.trunk.fc, self.trunk.hidden_norm, self.trunk.layers, self.trunk.norm
        for module in self.layers.modules():
            if isinstance(module, BlockConvolution):
                module.start()  # the trunk has drawn every matrix
        self.candidate_selector = Selector(config)
        self.markov_head = self.confidence_head = None

    @property
    def selector(self) -> Selector:  # type: ignore[override]
        """The name that engines load is `candidate_selector`; this one is the interface's."""
        return self.candidate_selector

    def encode(self, shared: Shared, texts: Texts) -> Pairs:
        return self.trunk.encode(texts)

    def states(self, shared: Shared, texts: Texts, encoded: Pairs, anchors: torch.Tensor) -> torch.Tensor:
        return self.trunk.states(shared, texts, encoded, anchors)

    def advance(
        self, shared: Shared, cache: DraftCache, taps: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
    ) -> None:
        self.trunk.advance(cache, taps, counts, rows)

    def draft(
        self,
        shared: Shared,
        cache: DraftCache,
        rows: torch.Tensor,
        anchor_ids: torch.Tensor,
        laws: Sequence[Law],
        uniforms: torch.Tensor | None = None,
    ) -> Proposal:
        hidden = self.trunk.draft_states(shared, cache, rows, anchor_ids)
        return walk(self, shared, hidden, anchor_ids, laws, uniforms)
