"""How a drafter proposes while decoding: context kept between rounds, one block, one left-to-right walk.

Layout of algorithms.md 2.3 (DSpark column) and 2.9 to 2.11.
Legend: B rows of this call, W new positions, K taps, D hidden size, G draft tokens, V vocabulary, Hk key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from specgraft.drafters.dspark import DSpark
from specgraft.drafters.layers import RMSNorm
from specgraft.drafters.shared import Shared
from specgraft.ops.sampling import Law, distributions, draw


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round. Filled by `propose`."""

    tokens: torch.Tensor  # [B, G] d_1..d_G
    q: torch.Tensor | None  # [B, G, V] float32, the law each draft was drawn from; None where every row is greedy
    confidence: torch.Tensor  # [B, G] logits that draft j is accepted, given that the drafts before it were


def at_precision(drafter: DSpark, dtype: torch.dtype) -> DSpark:
    """Moves the matrices to `dtype` in place; norms and the confidence head stay float32 when that is a half precision."""
    if dtype in (torch.float32, torch.float64):
        return drafter.to(dtype)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(dtype)
        elif isinstance(module, RMSNorm):
            module.float()
    drafter.confidence_head.float()
    return drafter


@contextmanager
def precision(drafter: DSpark) -> Iterator[None]:
    """Half-precision matrices meet float32 norms: autocast turns the inputs of the products, and nothing else."""
    dtype = drafter.fc.weight.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    with (
        torch.inference_mode(),
        torch.autocast(drafter.fc.weight.device.type, dtype if half else torch.bfloat16, enabled=half),
    ):
        yield


class BiasRows:
    """Rows W2 W1[y] of the Markov head, remembered by token y on the CPU.

    A walk reads all of W2 for every draft, as much memory as half the target at small vocabularies; text repeats its
    tokens, and a remembered row is W2's share of one token. The rows are the very values the product gave. They are
    forgotten when the head's weights change, the oldest used ones when `limit` bytes are full.
    """

    def __init__(self, drafter: DSpark, limit: int = 256 << 20) -> None:
        self.head, self.limit = drafter.markov_head, limit
        self.rows: dict[int, torch.Tensor] = {}
        self.state: tuple[int, ...] = ()

    def __call__(self, previous: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """float32 bias [B,V] of tokens previous [B] with Markov embeddings [B,r]."""
        if previous.is_cuda:  # there a product costs less than the look-up
            return self.head.markov_w2(embedded).float()
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
            fresh = self.head.markov_w2(embedded[missing] if len(missing) < len(ids) else embedded)
            for place, row in zip(missing, fresh.float(), strict=True):
                self.rows[ids[place]] = row.clone()
        out = torch.stack([self.rows[token] for token in ids])
        for token in ids:  # to the end: least recently used first
            if token in self.rows:
                self.rows[token] = self.rows.pop(token)
        while len(self.rows) * out.shape[1] * 4 > self.limit:
            del self.rows[next(iter(self.rows))]
        return out


class DraftCache:
    """Context keys and values of a drafter for `rows` sequences of up to `slots` positions.

    `lengths` [rows] counts context positions. Row b of the target's cache and of this one hold the same sequence.
    What lies behind a length is stale and is overwritten. `bias` may be shared by caches of one drafter.
    """

    def __init__(self, drafter: DSpark, rows: int, slots: int, bias: BiasRows | None = None) -> None:
        self.drafter, self.rows, self.slots = drafter, rows, slots
        self.bias = bias or BiasRows(drafter)
        self.device = drafter.fc.weight.device
        self.lengths = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values [rows, slots, Hk, d]

    def reset(self, rows: torch.Tensor) -> None:
        """Empties rows that go to other sequences."""
        self.lengths[rows] = 0

    def append(self, taps: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds the first counts[b] of taps [b,W,K,D] behind row rows[b]: only these positions are computed, once.

        Raises ValueError when a row is full.
        """
        positions = self.lengths[rows][:, None] + torch.arange(taps.shape[1], device=self.device)
        if int(positions.max()) >= self.slots:
            raise ValueError(
                f"a sequence needs {int(positions.max()) + 1} draft cache places and the cache has {self.slots}"
            )
        with precision(self.drafter):
            new = self.drafter.context(taps.to(self.drafter.fc.weight.dtype), positions)
        if not self.layers:
            shape = (self.rows, self.slots, *new[0][0].shape[2:])
            self.layers = [(key.new_zeros(shape), value.new_zeros(shape)) for key, value in new]
        for (keys, values), (key, value) in zip(self.layers, new, strict=True):
            keys[rows[:, None], positions] = key
            values[rows[:, None], positions] = value
        self.lengths[rows] += counts

    def view(self, rows: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Keys and values [B,T,Hk,d] a layer up to the longest of these rows, and which positions count [B,1,T]."""
        lengths = self.lengths[rows]
        reach = int(lengths.max())
        if len(rows) == 1:  # a slice, no copy
            row = int(rows[0])
            layers = [(keys[row : row + 1, :reach], values[row : row + 1, :reach]) for keys, values in self.layers]
        elif len(rows) == self.rows:  # rows are distinct and sorted: all of them
            layers = [(keys[:, :reach], values[:, :reach]) for keys, values in self.layers]
        else:
            layers = [(keys[rows, :reach], values[rows, :reach]) for keys, values in self.layers]
        return layers, (torch.arange(reach, device=self.device) < lengths[:, None])[:, None]


def propose(
    drafter: DSpark,
    shared: Shared,
    cache: DraftCache,
    rows: torch.Tensor,
    anchor_ids: torch.Tensor,
    laws: Sequence[Law],
    uniforms: torch.Tensor | None = None,
) -> Proposal:
    """Drafts G tokens behind each anchor.

    rows [B] cache rows, ascending and distinct; anchor_ids [B] the last committed token of each, whose position is the
    row's context length; laws [B]; uniforms [B,G] in [0,1), needed where a row is sampled.
    Draft j is drawn from law(U_j + W2 W1[x_{a+j-1}]) with U_j from the block (algorithms.md 2.9).
    """
    greedy = all(law.temperature == 0 for law in laws)
    assert greedy or uniforms is not None, "sampled rows need uniforms"
    with precision(drafter):
        context, visible = cache.view(rows)
        states = shared.embed(anchor_ids)[:, None]
        mask_state = shared.embed(torch.tensor(shared.mask_token_id, device=anchor_ids.device))
        hidden = drafter.block(states, mask_state, cache.lengths[rows][:, None], context, visible)[:, 0]
        base = torch.nn.functional.linear(hidden.to(shared.head.dtype), shared.head)
        previous, tokens, law_rows, confidence = anchor_ids, [], [], []
        for slot in range(drafter.config.draft_tokens):
            embedded = drafter.embed_previous(previous)
            confidence.append(drafter.confidence(hidden[:, slot], embedded))
            logits = cache.bias(previous, embedded).add_(base[:, slot])
            if greedy:
                previous = logits.argmax(-1)
            else:
                assert uniforms is not None
                law_rows.append(distributions(logits, laws))
                previous = draw(law_rows[-1], uniforms[:, slot])
            tokens.append(previous)
    q = None if greedy else torch.stack(law_rows, 1)
    return Proposal(torch.stack(tokens, 1), q, torch.stack(confidence, 1).float())
