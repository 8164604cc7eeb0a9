"""Gate "distribution identity": the captured last state, through the norm and head that training uses, is the target's law.

Legend: T tokens, P compared positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraft.check.reference import plain_pass
from specgraft.drafters.shared import Shared
from specgraft.records import Conversation, Features, GateResult
from specgraft.targets.model import Target

SHARE = 0.99  # of positions whose argmax agrees, in half precision
TIE, EXACT_TIE = 2.0**-6, 1e-4  # relative to the logit: closer ones may swap when a pass has another shape
LEAST_TIE = 0.1  # in half precision
TOP, LOG_TOLERANCE = 20, 0.05  # mean difference of the likeliest tokens' log-probabilities
ROWS = 16


def distribution_identity(target: Target, shared: Shared, rows: Sequence[tuple[Conversation, Features]]) -> GateResult:
    """Compares argmax lm_head(final_norm(last[t])) with the next token, on generated positions of greedy conversations.

    `shared` is what the drafter is trained with. The token is compared twice: with the stored greedy id and with the
    argmax of a plain pass of the unmodified model; the likeliest tokens' log-probabilities with the latter, too. At most
    16 conversations are used; sampled ones are passed over.
    """
    name = "distribution identity"
    if fault := head_fault(target, shared):
        return GateResult(name, False, fault)
    greedy = [(c, f) for c, f in rows if c.temperature == 0 and len(c.input_ids) > c.prompt_length > 0][:ROWS]
    if not greedy:
        return GateResult(name, False, "not run: no greedy conversation")
    positions, missed, apart = 0, {"stored ids": 0, "a plain pass": 0}, 0.0
    faults: list[str] = []
    for conversation, features in greedy:
        part = slice(conversation.prompt_length - 1, len(conversation.input_ids) - 1)
        own = shared_logits(shared, features.last[part].to(target.device))
        plain = plain_pass(target, conversation.input_ids).logits[part]
        stored = torch.tensor(conversation.input_ids[conversation.prompt_length :], device=own.device)
        positions += len(own)
        apart += float(top_difference(own, plain).sum())
        for what, wanted, law in (("stored ids", stored, own), ("a plain pass", plain.argmax(-1), plain)):
            misses, far = compare(own, wanted, law, target.dtype)
            missed[what] += misses
            if far is not None:
                where = f"{conversation.prompt_id} position {conversation.prompt_length + far[0]}"
                faults.append(f"{where}: argmax differs from {what} by {far[1]:.3f}, no tie")
    share = 1 - max(missed.values()) / positions
    mean = apart / positions
    measured = {"positions": float(positions), "agreement": share, "log_probability_difference": mean}
    figure = f"{share:.2%} of {positions} greedy positions agree, log-probabilities differ by {mean:.4f}"
    if faults:
        return GateResult(name, False, f"{figure}; {len(faults)} rows with true misses, first {faults[0]}", measured)
    if share < SHARE:
        return GateResult(name, False, f"{figure}; at least {SHARE:.0%} must", measured)
    if mean > LOG_TOLERANCE:
        return GateResult(
            name, False, f"{figure}; at most {LOG_TOLERANCE} is allowed: is the head or the norm another one?", measured
        )
    return GateResult(name, True, f"{figure} ({sum(missed.values())} near ties)", measured)


def head_fault(target: Target, shared: Shared) -> str | None:
    """A head that should be tied to the embedding and is not: it would be consistent with itself, so it is compared here."""
    if getattr(target.config, "tie_word_embeddings", False) and not torch.equal(
        target.head.weight, target.embedding.weight
    ):
        return (
            "the target's config ties head and embedding, but the loaded head is another tensor (random, or not found?)"
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


def compare(
    own: torch.Tensor, wanted: torch.Tensor, law: torch.Tensor, dtype: torch.dtype
) -> tuple[int, tuple[int, float] | None]:
    """Misses of argmax own [P,V] against ids wanted [P], and (position, gap) of the first that is no near tie in law [P,V]."""
    best = own.argmax(-1)
    missed = (best != wanted).nonzero()[:, 0]
    if not len(missed):
        return 0, None
    mine, theirs = best[missed], wanted[missed]
    rows = law[missed]
    place = torch.arange(len(missed), device=law.device)
    gap = (rows[place, mine] - rows[place, theirs]).abs()
    size = torch.maximum(rows[place, mine].abs(), rows[place, theirs].abs())
    exact = dtype in (torch.float32, torch.float64)
    limit = EXACT_TIE * size.clamp(min=1) if exact else (TIE * size).clamp(min=LEAST_TIE)
    far = (gap > limit).nonzero()[:, 0]
    return len(missed), (int(missed[far[0]]), float(gap[far[0]])) if len(far) else None


def top_difference(own: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """[P] mean |log-probability difference| over the plain law's likeliest tokens; a scaled head keeps argmax, not this."""
    ids = plain.topk(min(TOP, plain.shape[-1]), dim=-1).indices
    return (own.log_softmax(-1).gather(-1, ids) - plain.log_softmax(-1).gather(-1, ids)).abs().mean(-1)
