"""Gate "distribution identity": the captured last state, through the norm and head that training uses, is the target's law.

Legend: T tokens, P compared positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.check.reference import exact, plain_pass, whole
from specgraft.drafters.shared import Shared
from specgraft.records import Conversation, Features, GateResult
from specgraft.targets.model import Target

# Passes of another shape round otherwise in every layer. On SmolLM2-135M in bfloat16, 10,435 greedy tokens: 97.9 to 98.8 % of
# 16 texts' tokens agree, log-probabilities differ by 0.08, the widest miss is 0.5. A random head misses by 27.
HALF_SHARE, EXACT_SHARE = 0.95, 0.99  # of positions whose argmax agrees
FP8_SHARE = 0.85  # near ties swap more often: 97.7 % on SmolLM2 (98.5 % before e4m3), 92 % on a random model with a flat law
HALF_TIE, HALF_LEAST_TIE = 2.0**-4, 0.5  # a gap below this share of the logit, or below this, may swap
EXACT_TIE = 1e-4
TOP = 20  # likeliest tokens whose log-probabilities are compared
HALF_LOG, EXACT_LOG = 0.2, 1e-3  # mean difference
ROWS = 16


def distribution_identity(
    target: Target, shared: Shared, rows: Sequence[tuple[Conversation, Features]], stored: str = "target"
) -> GateResult:
    """Compares argmax lm_head(final_norm(last[t])) with the next token, on generated positions of greedy conversations.

    `shared` is what the drafter is trained with. The token is compared twice: with the stored greedy id and with the
    argmax of a plain pass of the unmodified model; the likeliest tokens' log-probabilities with the latter, too. Where the
    target's layers are not here, the stored ids alone are compared, and the figure says so. At most
    16 conversations are used; sampled ones, and recorded ones, are passed over. `stored` as in `tap_identity`.
    """
    name = "distribution identity"
    if fault := head_fault(target, shared):
        return GateResult(name, False, fault)
    greedy = [(c, f) for c, f in rows if c.temperature == 0 and c.answers == "target" and any(c.loss_mask[1:])][:ROWS]
    if not greedy:
        return GateResult(name, False, "not run: no greedy conversation")
    positions, missed, apart, widest = 0, {"stored ids": 0, "a plain pass": 0}, 0.0, 0.0
    here = whole(target)
    precise = exact(target, stored)
    least_share, most_apart = (EXACT_SHARE, EXACT_LOG) if precise else (FP8_SHARE if stored == "fp8" else HALF_SHARE, HALF_LOG)
    faults: list[str] = []
    for conversation, features in greedy:
        if features.input_ids.tolist() != conversation.input_ids:
            return GateResult(name, False, f"{conversation.prompt_id}: the features' ids are not the conversation's")
        label = torch.tensor(conversation.loss_mask[1:], device=target.device).nonzero()[:, 0] + 1  # the generated tokens
        own = shared_logits(shared, features.last.to(target.device)[label - 1])
        wrote = torch.tensor(conversation.input_ids, device=target.device)[label]
        positions += len(own)
        against = [("stored ids", wrote, own)]
        if here:
            plain = plain_pass(target, conversation.input_ids).logits[label - 1]
            apart += float(top_difference(own, plain).sum())
            against.append(("a plain pass", plain.argmax(-1), plain))
        for what, wanted, law in against:
            places, gap, limit = misses(own, wanted, law, precise)
            missed[what] += len(places)
            widest = max(widest, *gap.tolist(), 0.0)
            for row in (gap > limit).nonzero()[:1, 0].tolist():
                where = f"{conversation.prompt_id} token {int(label[places[row]])}"
                faults.append(f"{where}: argmax differs from {what} by {float(gap[row]):.3f}, no tie")
    share = 1 - max(missed.values()) / positions
    mean = apart / positions
    measured = {"positions": float(positions), "agreement": share, "widest_miss": widest, **({"log_probability_difference": mean} if here else {})}
    laws = f"log-probabilities differ by {mean:.4f}" if here else "log-probabilities not run (the target's layers are not loaded here)"
    figure = f"{share:.2%} of {positions} greedy positions agree, {laws}"
    if faults:
        return GateResult(name, False, f"{figure}; {len(faults)} texts with true misses, first {faults[0]}", measured)
    if share < least_share:
        return GateResult(name, False, f"{figure}; at least {least_share:.0%} must", measured)
    if mean > most_apart:
        detail = f"{figure}, at most {most_apart} is allowed: is the head or the norm another one?"
        return GateResult(name, False, detail, measured)
    return GateResult(name, True, f"{figure} ({sum(missed.values())} near ties)", measured)


def head_fault(target: Target, shared: Shared) -> str | None:
    """A head that should be tied to the embedding and is not: it would be consistent with itself, so it is compared here."""
    if getattr(target.config, "tie_word_embeddings", False) and not torch.equal(
        target.head.weight, target.embedding.weight
    ):
        return (
            "the target's config ties head and embedding, but the loaded head is another tensor (not found, so random?)"
        )
    for what, own, loaded in (
        ("head", shared.head, target.head.weight),
        ("embedding", shared.embedding, target.embedding.weight),
    ):
        if own.shape != loaded.shape:
            return f"the drafter's {what} is {tuple(own.shape)}, the target's {tuple(loaded.shape)}"
    return None


@torch.inference_mode()
def shared_logits(shared: Shared, last: torch.Tensor) -> torch.Tensor:
    """[P,V] float32 from states before the final norm [P,D], as training makes them."""
    return torch.nn.functional.linear(shared.final_norm(last).to(shared.head.dtype), shared.head).float()


def misses(
    own: torch.Tensor, wanted: torch.Tensor, law: torch.Tensor, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where argmax of own [P,V] is not the id wanted [P]: places [M], their gaps in the logits law [P,V], tie limits [M]."""
    best = own.argmax(-1)
    places = (best != wanted).nonzero()[:, 0]
    mine = law[places, best[places]]
    theirs = law[places, wanted[places]]
    size = torch.maximum(mine.abs(), theirs.abs())
    limit = EXACT_TIE * size.clamp(min=1) if exact else (HALF_TIE * size).clamp(min=HALF_LEAST_TIE)
    return places, (mine - theirs).abs(), limit


def top_difference(own: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """[P] mean |log-probability difference| over the plain law's likeliest tokens; a scaled head keeps argmax, not this."""
    ids = plain.topk(min(TOP, plain.shape[-1]), dim=-1).indices
    return (own.log_softmax(-1).gather(-1, ids) - plain.log_softmax(-1).gather(-1, ids)).abs().mean(-1)
