"""Expected decoding rounds of a text: the accept length predicted without the decode loop (algorithms.md 3.12; EDR).

The drafter runs as in training: one forward over captured taps, blocks at every anchor of the answer, the text's own
tokens as previous tokens. Nothing here is shared with the decode loop, so that one can check the other.
Legend: T tokens of prompt and answer, x_0 first answer token, x_{L+1} last one (end token, or where the limit cut it),
N anchors, G draft tokens, V vocabulary. Row n is the round that starts at anchor x_n, column j-1 its slot t = n+j <= L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraft.decode.pair import Pair
from specgraft.drafters.propose import precision
from specgraft.targets.sampling import Law, distribution


@dataclass(frozen=True)
class Prediction:
    """One text. Filled by `predict`."""

    tokens: int  # L+1: tokens that rounds commit (all but the first, which prefill gives)
    rounds: float  # J: expected rounds


def expected_rounds(accept: torch.Tensor, cost: torch.Tensor) -> float:
    """J = 1 + V[0] by the backward recursion, float64.

    accept [L,G] min(1, q(x_t)/p(x_t)); cost [L,G] chance that slot t ends the round, given that the text goes on.
    """
    length, size = accept.shape
    rows, costs = accept.double().tolist(), cost.double().tolist()
    value = [0.0] * (length + 1)
    for n in range(length - 1, -1, -1):
        going = 1 + value[n + size + 1] if n + size + 1 <= length else 0.0
        for t in range(min(n + size, length), n, -1):
            taken = rows[n][t - n - 1]
            going = costs[n][t - n - 1] + taken * going + (1 - taken) * value[t]
        value[n] = going
    return 1 + value[0]


def occupancy(accept: torch.Tensor) -> list[float]:
    """start[n], n = 0..L: chance that a round starts at x_n of this text, by the forward recursion, float64."""
    length, size = accept.shape
    rows = accept.double().tolist()
    start = [1.0] + [0.0] * length
    for n in range(length):
        mass = start[n]
        for t in range(n + 1, min(n + size, length) + 1):
            start[t] += mass * (1 - rows[n][t - n - 1])
            mass *= rows[n][t - n - 1]
        if n + size + 1 <= length:
            start[n + size + 1] += mass
    return start


def slot_terms(
    p: torch.Tensor, q: torch.Tensor, labels: torch.Tensor, end_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """accept and cost [R] of rows p, q [R,V] with text tokens labels [R]; end tokens do not count (the text went on)."""
    p_label, q_label = p.gather(-1, labels[:, None])[:, 0].double(), q.gather(-1, labels[:, None])[:, 0].double()
    accept = torch.where(p_label > 0, (q_label / p_label.clamp(min=1e-300)).clamp(max=1), 1.0)
    short = (p - q).clamp(min=0)
    ends = torch.tensor(end_ids, device=p.device)
    missed = short.sum(-1).double() - short[:, ends].sum(-1).double()
    going = 1 - p[:, ends].sum(-1).double()
    return accept, (missed / going.clamp(min=1e-12)).clamp(0, 1)


def predict(pair: Pair, prompt: list[int], answer: list[int], law: Law, chunk: int = 64) -> Prediction | None:
    """Expected rounds of an answer under `law`; None where no round is needed (one token)."""
    length = len(answer) - 2  # L
    if length < 0:
        return None
    if length == 0:
        return Prediction(1, 1.0)
    with precision(pair.drafter):
        return Prediction(length + 1, expected_rounds(*text_terms(pair, prompt, answer, law, chunk)))


def text_terms(
    pair: Pair, prompt: list[int], answer: list[int], law: Law, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """accept and cost [L,G] of a text, for every round that could start in it; `chunk` anchors at a time.

    Slots that cannot be reached (an accept of 0 before them) are not computed.
    """
    length = len(answer) - 2
    target, drafter, shared = pair.target, pair.drafter, pair.shared
    size, device = drafter.config.draft_tokens, target.device
    ids = torch.tensor([*prompt, *answer], device=device)
    cache = target.cache(1, len(ids))
    step = target.forward(ids[None], cache, drafter.config.taps)
    assert step.taps is not None
    context = drafter.context(step.taps.to(drafter.fc.weight.dtype), torch.arange(len(ids), device=device)[None])
    accept = torch.zeros(length, size, dtype=torch.float64)
    cost = torch.zeros(length, size, dtype=torch.float64)
    mask_state = shared.embed(torch.tensor(shared.mask_token_id, device=device))
    for start in range(0, length, chunk):
        n = torch.arange(start, min(start + chunk, length), device=device)
        anchors = n + len(prompt)
        visible = torch.arange(len(ids), device=device) < anchors[:, None]
        hidden = drafter.block(shared.embed(ids[anchors])[None], mask_state, anchors[None], context, visible[None])[0]
        # laws of the target and biases of the Markov head belong to positions, and slots of several anchors share them
        near = torch.arange(int(anchors[0]), min(int(anchors[-1]) + size, len(ids) - 1), device=device)
        bias = drafter.markov_head.markov_w2(drafter.embed_previous(ids[near])).float()
        if law.temperature > 0:
            laws = distribution(target.logits(step.last[0, near]), law.temperature, law.top_p, law.top_k)
        alive = torch.ones(len(n), dtype=torch.bool, device=device)
        for slot in range(size):
            alive &= n + slot + 1 <= length
            here = alive.nonzero()[:, 0]
            if not len(here):
                break
            before = anchors[here] + slot
            logits = (hidden[here, slot].to(shared.head.dtype) @ shared.head.T).float() + bias[before - anchors[0]]
            labels = ids[before + 1]
            if law.temperature == 0:  # the text is the target's own argmax
                taken = (logits.argmax(-1) == labels).double()
                missed = 1 - taken
            else:
                q = distribution(logits, law.temperature, law.top_p, law.top_k)
                taken, missed = slot_terms(laws[before - anchors[0]], q, labels, target.end_ids)
            accept[n[here].cpu(), slot], cost[n[here].cpu(), slot] = taken.cpu(), missed.cpu()
            alive[here] = taken > 0
    return accept, cost


def pooled(predictions: list[Prediction | None]) -> float | None:
    """Predicted pooled accept length: all tokens over all expected rounds."""
    found = [prediction for prediction in predictions if prediction is not None]
    return sum(p.tokens for p in found) / sum(p.rounds for p in found) if found else None
