"""Draft-verify rounds and the Draft-OPD loss by their formulas: one text, one round, one slot at a time, nothing recorded.

Legend: T tokens, G draft tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.nn import functional as F

from by_hand import F64, randomised
from specgraft.decode.pair import Pair, pair
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch
from specgraft.drafters.config import FULL, SLIDING
from specgraft.drafters.drafter import Texts
from specgraft.drafters.walk import Corrector
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate

VOCAB, ENDS = 8, [1]
KINDS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp", "layers": 1},
    "dflash": {"kind": "dflash", "layer_types": (SLIDING, FULL), "sliding_window": 6},
    "dflash2": {"kind": "dflash2", "conv_group": 8, "selector_rank": 6, "selector_top_k": 4},
    "vanilla": {"markov_head": "vanilla"},
    "gated": {"markov_head": "gated", "confidence_with_markov": False},
    "rnn": {"markov_head": "rnn", "block_causal": True},
    "no head": {"markov_rank": 0, "confidence": False},
}


def make(tiny_target: Any, tiny_drafter: Any, name: str, seed: int = 7, dtype: torch.dtype = F64) -> Pair:
    """A target (float64) and a random drafter of the kind, every weight trained; a random draft is right now and then."""
    target = tiny_target(vocab=VOCAB, dtype=dtype, end=ENDS, markov=8.0, spread=0.2, seed=2)
    return pair(target, randomised(tiny_drafter(target, rank=8, taps=(0, 2), bigram=0.0, **KINDS[name]), seed))


def batch_of_texts(prompts: list[list[int]], answers: list[int], packed: bool = False) -> Batch:
    """Prompts with reference answers of these lengths (tokens that nothing reads); a row each, or all in one."""
    texts = [[*ids, *[6] * count] for ids, count in zip(prompts, answers, strict=True)]
    masks = [[False] * len(ids) + [True] * count for ids, count in zip(prompts, answers, strict=True)]
    if packed:
        starts = [sum(len(text) for text in texts[:n]) for n in range(len(texts))]
        first = torch.tensor([[start for start, text in zip(starts, texts, strict=True) for _ in text]])
        ids, mask = torch.tensor([list(chain(*texts))]), torch.tensor([list(chain(*masks))])
    else:
        width = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        mask = torch.tensor([row + [False] * (width - len(row)) for row in masks])
        first = torch.where(torch.arange(width) < torch.tensor([[len(text)] for text in texts]), 0, torch.tensor([[len(text)] for text in texts]))
    none = torch.zeros(len(ids), 1, dtype=torch.long)
    anchors = Anchors(none, none.bool(), torch.zeros(len(ids), 1, 4, dtype=torch.bool))
    return Batch(Texts(ids, torch.zeros(*ids.shape, 2, 32, dtype=F64), first), torch.zeros(*ids.shape, 32, dtype=F64), anchors, mask)


def some_prompts() -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 9, 1, 6)], [11, 6, 9, 1]


def greedy(both: Pair, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """The target's own answers, without a drafter."""
    requests = [PlainRequest(ids, count) for ids, count in zip(prompts, counts, strict=True)]
    generate(both.target, requests, 3)
    return [request.output for request in requests]


def plain(both: Pair, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [T,K,D] and last states [T,D] of a text that is run alone."""
    step = both.target.forward(torch.tensor([ids]), both.target.cache(1, len(ids)), both.drafter.config.taps)
    assert step.taps is not None
    return step.taps[0].clone(), step.last[0].clone()


@dataclass
class Slot:
    """One slot of one round."""

    j: int
    log_q: torch.Tensor  # [V] with graph
    log_p: torch.Tensor  # [V]
    sure: torch.Tensor | None  # confidence logit
    said: int | None  # token of the response stream
    refused: int | None  # token of the rejected stream


@dataclass
class Round:
    anchor: int
    drafts: list[int]
    accepted: int
    states: torch.Tensor  # [G,D]
    slots: list[Slot] = field(default_factory=list)


def rounds_by_hand(both: Pair, prompt: list[int], answer: list[int]) -> list[Round]:
    """The rounds that decoding `answer` behind `prompt` takes, and what is learnt from their slots."""
    drafter, shared, size = both.drafter, both.shared, both.drafter.config.draft_tokens
    text = prompt + answer
    taps, _ = plain(both, text)
    texts = Texts(torch.tensor([text]), taps[None], torch.zeros(1, len(text), dtype=torch.long))
    found, anchor = [], len(prompt)
    while anchor < len(text) - 1:
        hidden = drafter(shared, texts, torch.tensor([[anchor]]))[0, 0]
        correct, tokens, laws, sures = Corrector(drafter), [text[anchor]], [], []
        for h in hidden:
            base = shared.head @ h
            logits, sure = correct(base[None], h[None], torch.tensor(tokens[-1:]))
            laws.append((base if drafter.selector is not None else logits[0]).log_softmax(-1))
            sures.append(None if sure is None else sure[0])
            tokens.append(int(logits[0].argmax()))
        drafts = tokens[1:]
        _, last = plain(both, text[: anchor + 1] + drafts[:-1])
        states = last[anchor : anchor + size]
        log_p = (shared.head @ shared.final_norm(states).T).T.log_softmax(-1)
        rest, accepted = text[anchor + 1 :], 0
        while accepted < min(size, len(rest)) and drafts[accepted] == rest[accepted]:
            accepted += 1
        now, closed = Round(anchor, drafts, accepted, states), False
        cut = accepted == len(rest)  # the text is at its end: what was drafted behind was not judged
        for j in range(1, size + 1):
            said = rest[j - 1] if j <= min(accepted + 1, len(rest)) else None
            refused = drafts[j - 1] if j > accepted and not cut and not closed else None
            closed = closed or (refused in ENDS)
            if said is not None or refused is not None:
                now.slots.append(Slot(j, laws[j - 1], log_p[j - 1], sures[j - 1], said, refused))
        found.append(now)
        anchor += accepted + 1
    return found


def loss_by_hand(
    rounds: list[Round], weight: float = 1.0, decay: float = 0.8, confidence: float = 1.0, token: bool = False
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss with graph, and what is divided by what."""
    told, refused, sure = [torch.zeros((), dtype=F64)], [torch.zeros((), dtype=F64)], [torch.zeros((), dtype=F64)]
    below = {"response": 0.0, "confidence": 0.0}
    for slot in [slot for each in rounds for slot in each.slots]:
        p, q = slot.log_p.exp(), slot.log_q.exp()
        if slot.said is not None:
            t, s = p[slot.said].clamp(min=torch.tensor(-10.0).exp()), q[slot.said].clamp(min=torch.tensor(-10.0).exp())
            one = t * (t / s).log() + (1 - t) * ((1 - t) / (1 - s)).log()
            told.append(one.clamp(max=10) if token else (p * (slot.log_p - slot.log_q)).sum())
            below["response"] += 1
        if slot.refused is not None and weight:
            w, ratio = weight * decay ** (slot.j - 1), p[slot.refused] / q[slot.refused]
            refused.append(w * ((ratio - 1 - ratio.log()).clamp(max=10) if token else (q * (slot.log_q - slot.log_p)).sum()))
            below["response"] += w
        if slot.sure is not None and (slot.said is not None or weight):
            w, label = float(torch.tensor(-(slot.j - 1) / 4.0).exp()), torch.minimum(p, q).sum().detach()
            sure.append(-w * (label * F.logsigmoid(slot.sure) + (1 - label) * F.logsigmoid(-slot.sure)))
            below["confidence"] += w
    above = {"response": sum(told), "rejected": sum(refused), "confidence": confidence * sum(sure)}
    loss = (above["response"] + above["rejected"]) / (below["response"] + 1e-6) + above["confidence"] / (below["confidence"] + 1e-6)
    return loss, {name: float(value.detach()) for name, value in above.items()} | {f"of {name}": value for name, value in below.items()}
