"""SpecOPD by its definition: every branch alone through transformers' own Llama, full laws, autograd through the products.

Legend: B rows, T tokens, N branches of a tree, W nodes a branch, G draft tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from by_hand import F64, confidence_by_hand, logits_by_hand
from specgraft.config import DistillSection
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch
from specgraft.distill.weights import decay_weights
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared
from specgraft.records import ProposalTree, TargetScores
from specgraft.targets.model import Target

KINDS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp"},
    "dflash": {"kind": "dflash"},
    "dflash2": {"kind": "dflash2", "conv_group": 8, "selector_rank": 6, "selector_top_k": 6},
    "vanilla": {"rank": 6},
    "gated": {"rank": 6, "markov_head": "gated"},
    "rnn": {"rank": 6, "markov_head": "rnn"},
}


class AloneScorer:
    """Scores every branch in a pass of its own, [stem up to the anchor, branch], eager attention, no cache."""

    def __init__(self, target: Target) -> None:
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        self.model: Any = LlamaForCausalLM(config).to(target.dtype)
        self.model.load_state_dict(target.model.state_dict())
        self.model.eval()
        self.seen: list[tuple[torch.Tensor, ProposalTree]] = []  # what was asked last

    @torch.no_grad()
    def states(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Output [T,D] of each decoder layer of ids [T], before any norm."""
        kept: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda module, args, output: kept.append((output[0] if isinstance(output, tuple) else output)[0]))
            for layer in self.model.model.layers
        ]
        try:
            self.model(ids[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return kept

    def __call__(self, stems: Sequence[torch.Tensor], trees: Sequence[ProposalTree]) -> list[TargetScores]:
        self.seen = list(zip(stems, trees, strict=True))
        found = []
        for ids, tree in self.seen:
            assert tree.stem == len(ids) and int(tree.anchors.max()) < len(ids)
            rows = [
                self.states(torch.cat([ids[: anchor + 1], branch]))[-1][anchor + 1 :]
                for anchor, branch in zip(tree.anchors.tolist(), tree.branches, strict=True)
            ]
            found.append(TargetScores(torch.stack(rows)))
        return found


def answers_batch(
    scorer: AloneScorer, rows: Sequence[Sequence[int]], anchors: Sequence[Sequence[int]], taps: Sequence[int], draft_tokens: int, vocab: int
) -> Batch:
    """Rows of random documents of these lengths, back to back, with the target's own states; anchors [B][N], -1: none."""
    generator = torch.Generator().manual_seed(3)
    width = max(sum(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    starts = torch.zeros_like(ids)
    states = torch.zeros(len(rows), width, len(taps) + 1, scorer.model.config.hidden_size, dtype=scorer.model.dtype)
    for row, lengths in enumerate(rows):
        first = 0
        for length in lengths:
            own = torch.randint(2, vocab, (length,), generator=generator)
            ids[row, first : first + length], starts[row, first : first + length] = own, first
            layers = scorer.states(own)
            states[row, first : first + length] = torch.stack([*(layers[tap] for tap in taps), layers[-1]], 1)
            first += length
        starts[row, first:] = first
    position = torch.tensor(anchors)
    keep = position >= 0
    mask = keep[..., None].expand(-1, -1, draft_tokens).clone()
    return Batch(Texts(ids, states[:, :, :-1], starts), states[:, :, -1], Anchors(position.clamp(min=0), keep, mask))


@dataclass
class Branch:
    """One branch as the definition sees it."""

    tokens: list[int]  # x_a, d_1 .. d_W
    p: list[torch.Tensor]  # [V] of every supervised slot, constants
    q: list[torch.Tensor]  # [V], with graph
    confidence: list[torch.Tensor] = field(default_factory=list)  # logits

    @property
    def alpha(self) -> list[torch.Tensor]:
        return [torch.minimum(p, q).sum() for p, q in zip(self.p, self.q, strict=True)]

    @property
    def reached(self) -> list[float]:
        """Accept ratios of the tokens before each slot, multiplied."""
        ratios = [min(1.0, float(p[d] / q[d].detach())) for p, q, d in zip(self.p, self.q, self.tokens[1:], strict=False)]
        return [math.prod(ratios[:slot]) for slot in range(len(self.p))]


def draft_laws(drafter: Drafter, shared: Shared, hidden: torch.Tensor, previous: list[int]) -> list[torch.Tensor]:
    """q_j [V] of h [G',D] behind the tokens `previous`, whatever the kind."""
    if drafter.selector is None:
        return list(logits_by_hand(drafter, shared, hidden, previous).softmax(-1))
    w, laws = dict(drafter.named_parameters()), []
    for h, token in zip(hidden, previous, strict=True):
        unary = shared.head @ h
        gate = w["candidate_selector.predecessor_codebook"][token] * (w["candidate_selector.hidden_projection.weight"] @ h)
        outside = torch.ones(len(unary), dtype=torch.bool)
        outside[unary.detach().topk(drafter.config.selector_top_k).indices] = False
        laws.append((unary + w["candidate_selector.successor_codebook"] @ gate).masked_fill(outside, -math.inf).softmax(-1))
    return laws


def branches_of(drafter: Drafter, shared: Shared, batch: Batch, scorer: AloneScorer, many: int, end_ids: Sequence[int]) -> list[Branch]:
    """The branches that the scorer was asked about, each taken up again from its tokens alone."""
    found, size = [], drafter.config.draft_tokens
    asked = iter(scorer.seen)
    for row, anchors in enumerate(batch.anchors.position.tolist()):
        places = [a for a, keep in zip(anchors, batch.anchors.keep[row].tolist(), strict=True) if keep]
        for start in sorted({int(batch.texts.starts[row, a]) for a in places}):
            mine = [a for a in places if int(batch.texts.starts[row, a]) == start for _ in range(many)]
            branches = [[] for _ in mine]
            if size > 1:
                ids, tree = next(asked)
                assert [start + a for a in tree.anchors.tolist()] == mine
                assert torch.equal(ids, batch.texts.input_ids[row, start : start + len(ids)])
                branches = tree.branches.tolist()
            for anchor, drawn in zip(mine, branches, strict=True):
                stem = batch.texts.input_ids[row, start : anchor + 1]
                tokens = [int(stem[-1]), *drawn]
                ends = [slot for slot, token in enumerate(drawn) if token in end_ids]
                count = ends[0] + 1 if ends else size  # slots up to the one that drew the end
                states = scorer.states(torch.cat([stem, torch.tensor(drawn, dtype=torch.long)]))[-1][len(stem) - 1 :]
                with torch.no_grad():
                    p = (shared.final_norm(states[:count]) @ shared.head.T).softmax(-1)
                hidden = drafter(shared, batch.texts, torch.tensor([[anchor]] * len(batch.texts.input_ids)))[row, 0, :count]
                one = Branch(tokens, list(p), draft_laws(drafter, shared, hidden, tokens[:count]))
                if drafter.confidence_head is not None:
                    one.confidence = [confidence_by_hand(drafter, h, token) for h, token in zip(hidden, tokens, strict=False)]
                found.append(one)
    return found


def loss_of_branches(branches: list[Branch], options: DistillSection, kind: str, confident: bool) -> torch.Tensor:
    """e2e_tv (and confidence) by autograd through the products of overlaps (algorithms.md 3.8, step 6)."""
    mix = options.weights(kind)
    total = torch.zeros((), dtype=F64)
    for one in branches:
        reach = [torch.stack(one.alpha[: slot + 1]).prod() for slot in range(len(one.alpha))]
        total = total + (1 - torch.stack(reach).mean())
    loss = mix["e2e_tv"] * total / (len(branches) + 1e-6)
    if confident and "confidence" in mix:
        decay = decay_weights(64, options.decay).double()
        terms, weights = [], []
        for one in branches:
            for slot, (logit, alpha) in enumerate(zip(one.confidence, one.alpha, strict=True)):
                label = alpha.detach()
                terms.append(-decay[slot] * (label * F.logsigmoid(logit) + (1 - label) * F.logsigmoid(-logit)))
                weights.append(decay[slot])
        loss = loss + mix["confidence"] * torch.stack(terms).sum() / (torch.stack(weights).sum() + 1e-6)
    return loss
