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
from specgraft.drafters.drafter import Texts
from specgraft.drafters.precision import precision
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
    texts = Texts(ids[None], step.taps.to(drafter.fc.weight.dtype), torch.zeros_like(ids)[None])
    encoded = drafter.encode(shared, texts)
    accept = torch.zeros(length, size, dtype=torch.float64)
    cost = torch.zeros(length, size, dtype=torch.float64)
    for start in range(0, length, chunk):
        n = torch.arange(start, min(start + chunk, length), device=device)
        anchors = n + len(prompt)
        hidden = drafter.states(shared, texts, encoded, anchors[None])[0]
        logits_at = _Teacher(pair, ids, anchors, hidden)
        near = torch.arange(int(anchors[0]), min(int(anchors[-1]) + size, len(ids) - 1), device=device)
        if law.temperature > 0:  # laws of the target belong to positions, and slots of several anchors share them
            laws = distribution(target.logits(step.last[0, near]), law.temperature, law.top_p, law.top_k)
        alive = torch.ones(len(n), dtype=torch.bool, device=device)
        for slot in range(size):
            alive &= n + slot + 1 <= length
            here = alive.nonzero()[:, 0]
            if not len(here):
                break
            before = anchors[here] + slot
            logits, labels = logits_at(here, slot), ids[before + 1]
            if law.temperature == 0:  # the text is the target's own argmax
                taken = (logits.argmax(-1) == labels).double()
                missed = 1 - taken
            else:
                q = distribution(logits, law.temperature, law.top_p, law.top_k)
                taken, missed = slot_terms(laws[before - anchors[0]], q, labels, target.end_ids)
            accept[n[here].cpu(), slot], cost[n[here].cpu(), slot] = taken.cpu(), missed.cpu()
            alive[here] = taken > 0
    return accept, cost


class _Teacher:
    """Draft logits with the text's own tokens before each draft, as in training; hidden [N,G,D] of anchors [N]."""

    def __init__(self, pair: Pair, ids: torch.Tensor, anchors: torch.Tensor, hidden: torch.Tensor) -> None:
        self.drafter, self.head, self.hidden = pair.drafter, pair.shared.head, hidden
        steps = torch.arange(hidden.shape[1], device=ids.device)
        self.previous = ids[(anchors[:, None] + steps).clamp(max=len(ids) - 1)]  # [N, G]
        markov = self.drafter.markov_head
        self.latents = None if markov is None else markov.latents(hidden, markov.embed(self.previous))

    def __call__(self, here: torch.Tensor, slot: int) -> torch.Tensor:
        """float32 logits [R,V] of draft slot+1 for the anchors numbered `here` [R]."""
        hidden = self.hidden[here, slot]
        base = (hidden.to(self.head.dtype) @ self.head.T).float()
        if self.drafter.selector is not None:
            return self.drafter.selector.logits(base, hidden, self.previous[here, slot])
        if self.latents is None:
            return base
        assert self.drafter.markov_head is not None
        return base + self.drafter.markov_head.bias(self.latents[here, slot])


def pooled(predictions: list[Prediction | None]) -> float | None:
    """Predicted pooled accept length: all tokens over all expected rounds."""
    found = [prediction for prediction in predictions if prediction is not None]
    return sum(p.tokens for p in found) / sum(p.rounds for p in found) if found else None
