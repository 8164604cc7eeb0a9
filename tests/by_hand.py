"""Drafters and objectives by their formulas: one anchor, one slot, one head at a time, sharing nothing but the weights.

Legend: T tokens, K taps, D hidden size, S slots of a block, G draft tokens, V vocabulary, H heads, d head size, r rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from specgraft.distill.anchors import Anchors, slot_mask
from specgraft.distill.batch import Batch
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.layers import rope_tables
from specgraft.drafters.shared import Shared

F64 = torch.float64
Sums = dict[str, list[float]]


def randomised(drafter: Drafter, seed: int = 7, spread: float = 0.3) -> Drafter:
    """Every weight random and norms not one, so that a part that is left out shows; in training mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        noise = spread * torch.randn(parameter.shape, generator=generator, dtype=F64)
        parameter.data = ((1.0 if "norm" in name else 0.0) + noise).to(parameter.dtype)
    return drafter.requires_grad_(True).train()


def batch_of(
    lengths: list[int],
    anchors: list[list[int]],
    prompt: int,
    draft_tokens: int,
    dtype: torch.dtype = F64,
    seed: int = 0,
    vocab: int = 64,
    hidden: int = 32,
    taps: int = 3,
) -> Batch:
    """Random rows of these lengths, a document each, supervised behind `prompt` tokens; anchors are padded by -1."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, vocab, (len(lengths), longest), generator=generator)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    loss_mask = inside & (torch.arange(longest) >= prompt)
    position = torch.tensor(anchors)
    keep = position >= 0
    position = position.clamp(min=0)
    starts = torch.zeros_like(ids)
    states = torch.randn(len(lengths), longest, taps, hidden, generator=generator, dtype=F64).to(dtype)
    last = 3 * torch.randn(len(lengths), longest, hidden, generator=generator, dtype=F64).to(dtype)
    return Batch(
        Texts(ids * inside, states, starts), last, Anchors(position, keep, slot_mask(loss_mask, starts, position, keep, draft_tokens))
    )


# --- one block


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turned(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Rotary embedding of x [S,H,d] at these positions."""
    cos, sin = rope_tables(torch.tensor(positions), x.shape[-1], 10_000.0)
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]


def block_by_hand(drafter: Drafter, shared: Shared, ids: list[int], taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """h [G,D] of one dspark or dflash block of the document ids [T], taps [T,K,D].

    It is given the taps before the anchor and the anchor's token, so it can see nothing else.
    """
    c, w = drafter.config, dict(drafter.named_parameters())
    size = {"dspark": c.draft_tokens, "dflash": c.draft_tokens + 1}[c.kind]
    context = norm(taps[:anchor].flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = shared.embedding[torch.tensor([ids[anchor]] + [shared.mask_token_id] * (size - 1))]
    slots = [anchor + slot for slot in range(size)]
    places = [*range(anchor), *slots]
    for index in range(c.layers):
        at = f"layers.{index}."
        seen = torch.ones(size, len(places), dtype=torch.bool)
        for slot in range(size):
            for place in range(anchor):
                if c.layer_types[index] == "sliding_attention":
                    seen[slot, place] = slots[slot] - place < c.sliding_window
            for other in range(size):
                seen[slot, anchor + other] = other <= slot or not c.block_causal
        y = norm(x, w[at + "input_layernorm.weight"])
        both = torch.cat([context, y])
        q = turned(norm((y @ w[at + "self_attn.q_proj.weight"].T).view(-1, c.heads, c.head_dim), w[at + "self_attn.q_norm.weight"]), slots)
        k = (both @ w[at + "self_attn.k_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        k = turned(norm(k, w[at + "self_attn.k_norm.weight"]), places)
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, c.kv_heads, c.head_dim)
        heads = []
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            scores = (q[:, head] @ k[:, group].T / math.sqrt(c.head_dim)).masked_fill(~seen, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gate @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])[size - c.draft_tokens :]  # dspark: slot j-1 is draft j; dflash: slot j


def documents(texts: Texts, row: int) -> list[int]:
    """Where the documents of a row start."""
    return sorted(set(texts.starts[row].tolist()))


def blocks_by_hand(drafter: Drafter, shared: Shared, texts: Texts, anchors: torch.Tensor) -> torch.Tensor:
    """h [B,N,G,D]: every block on its own, in its own document."""
    rows = []
    for row, places in enumerate(anchors.tolist()):
        blocks = []
        for anchor in places:
            start = int(texts.starts[row, anchor])
            stop = min([place for place in documents(texts, row) if place > anchor], default=texts.input_ids.shape[1])
            ids, taps = texts.input_ids[row, start:stop].tolist(), texts.taps[row, start:stop]
            blocks.append(block_by_hand(drafter, shared, ids, taps, anchor - start))
        rows.append(torch.stack(blocks))
    return torch.stack(rows)


# --- the heads behind a block


def logits_by_hand(drafter: Drafter, shared: Shared, hidden: torch.Tensor, previous: list[int]) -> torch.Tensor:
    """Logits [G,V] of the drafts of one block from h [G,D] and the token before each."""
    w, kind = dict(drafter.named_parameters()), drafter.config.markov_head
    rows = []
    state = torch.zeros(drafter.config.markov_rank, dtype=hidden.dtype)
    for h, token in zip(hidden, previous, strict=True):
        z = shared.head @ h
        if drafter.config.markov_rank:
            e = w["markov_head.markov_w1.weight"][token]
            latent = e
            if kind == "gated":
                latent = torch.sigmoid(w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]) * e
            elif kind == "rnn":
                joint = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h]) + w["markov_head.joint_proj.bias"]
                gate, new, out = joint.view(3, -1)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                latent = torch.tanh(out)
            z = z + w["markov_head.markov_w2.weight"] @ latent
        rows.append(z)
    return torch.stack(rows)


def confidence_by_hand(drafter: Drafter, hidden: torch.Tensor, token: int) -> torch.Tensor:
    """Logit of one slot from h [D] and the token before it."""
    c, w = drafter.config, dict(drafter.named_parameters())
    x = hidden
    if c.confidence_with_markov and c.markov_rank:
        x = torch.cat([x, w["markov_head.markov_w1.weight"][token]])
    return w["confidence_head.proj.weight"][0] @ (x.detach() if c.confidence_detach else x) + w["confidence_head.proj.bias"][0]


# --- objectives


def divergences(z: torch.Tensor, p: torch.Tensor, label: int, eta: float) -> dict[str, torch.Tensor]:
    """The pointwise losses of one slot, logits z [V] against the law p [V] (algorithms.md 3.2)."""
    log_q = z.log_softmax(-1)
    q, mix = log_q.exp(), (p + log_q.exp()) / 2
    kl, alpha = (p * (p.log() - log_q)).sum(), torch.minimum(p, q).sum()
    tv = (p - q).abs().sum() / 2
    share = math.exp(-eta * float(alpha.detach()))
    return {
        "ce": -log_q[label],
        "kl": kl,
        "rkl": (q * (log_q - p.log())).sum(),
        "jsd": ((p * (p / mix).log()).sum() + (q * (q / mix).log()).sum()) / 2,
        "tv": tv,
        "l1": 2 * tv,
        "lk_alpha": -alpha.log(),
        "lk_hybrid": share * kl + (1 - share) * tv,
        "alpha": alpha,
    }


def loss_by_hand(
    drafter: Drafter, shared: Shared, batch: Batch, mix: dict[str, float], *, decay: float = 4.0, eta: float = 3.0, delta: float = 0.5
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float], Sums]:
    """Loss with graph; numerators (objective's weight included) and denominators by part; sums per slot of every loss."""
    size = drafter.config.draft_tokens
    zero = torch.zeros((), dtype=F64)
    numerators = {"slots": zero} | {name: zero for name in ("dpace", "e2e_tv", "confidence") if name in mix}
    denominators = dict.fromkeys(numerators, 0.0)
    sums: Sums = {}
    hidden = blocks_by_hand(drafter, shared, batch.texts, batch.anchors.position)
    for row, places in enumerate(batch.anchors.position.tolist()):
        ids = batch.texts.input_ids[row].tolist()
        for block, anchor in enumerate(places):
            count = int(batch.anchors.mask[row, block].sum())
            if not count:
                continue
            assert batch.anchors.mask[row, block, :count].all()  # a prefix
            previous = ids[anchor : anchor + count]
            logits = logits_by_hand(drafter, shared, hidden[row, block, :count], previous)
            slots = []
            for j in range(1, count + 1):
                p = (shared.head @ shared.final_norm(batch.last[row, anchor + j - 1])).softmax(-1).detach()
                found = divergences(logits[j - 1], p, ids[anchor + j], eta)
                found["hit"] = (logits[j - 1].argmax() == p.argmax()).to(F64)
                if drafter.confidence_head is not None:
                    c = confidence_by_hand(drafter, hidden[row, block, j - 1], previous[j - 1])
                    label = found["alpha"].detach()
                    found["bce"] = -(label * F.logsigmoid(c) + (1 - label) * F.logsigmoid(-c))
                slots.append(found)
                for name, value in found.items():
                    sums.setdefault(name, [0.0] * size)[j - 1] += float(value.detach())
                sums.setdefault("count", [0.0] * size)[j - 1] += 1
            for j, found in enumerate(slots, 1):
                weight = math.exp(-(j - 1) / decay)
                denominators["slots"] += weight
                numerators["slots"] = numerators["slots"] + weight * sum((mix[name] * found[name] for name in found if name in mix), zero)
                if "confidence" in mix:
                    numerators["confidence"] = numerators["confidence"] + mix["confidence"] * weight * found["bce"]
                    denominators["confidence"] += weight
                if "dpace" in mix:
                    reach = [math.prod((1 - delta) * math.exp(-float(slots[k]["ce"].detach())) + delta for k in range(i)) for i in range(j, count + 1)]
                    numerators["dpace"] = numerators["dpace"] + mix["dpace"] * sum(reach) * found["ce"]
                    denominators["dpace"] += sum(reach)
            if "e2e_tv" in mix:
                survived = [torch.stack([found["alpha"] for found in slots[:j]]).prod() for j in range(1, count + 1)]
                numerators["e2e_tv"] = numerators["e2e_tv"] + mix["e2e_tv"] * (1 - torch.stack(survived).mean())
                denominators["e2e_tv"] += 1
    loss = sum((numerators[name] / (denominators[name] + 1e-6) for name in numerators), zero)
    return loss, numerators, denominators, sums


def same_gradients(drafter: Drafter, found: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-7, still: Any = ()) -> None:
    """Every parameter has the same gradient, and none but those whose names start with one of `still` has none."""
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    left = torch.autograd.grad(found, parameters, allow_unused=True)
    right = torch.autograd.grad(expected, parameters, allow_unused=True)
    for name, a, b in zip(names, left, right, strict=True):
        idle = name.startswith(tuple(still))
        largest = 0.0 if b is None else float(b.abs().max())
        assert (largest > 0) is not idle, name
        if b is None or a is None:
            assert idle and (a is None or not a.any()), name
            continue
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(largest, 1e-3), msg=lambda text, name=name: f"{name}: {text}")
