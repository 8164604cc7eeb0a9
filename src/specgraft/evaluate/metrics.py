"""Accept length and friends from the rounds of the decode loop (algorithms.md 5.2 and 6.1). Pure functions.

Legend: n rounds, G draft tokens. The bonus token is counted everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specgraft.records import Verdict

BINS = 20  # equal-width, for reporting (DeepSpec)


def committed(rounds: Sequence[Verdict]) -> int:
    """Tokens that the rounds added to the text."""
    return sum(len(verdict.committed) for verdict in rounds)


def accept_length(requests: Iterable[Sequence[Verdict]]) -> float | None:
    """Request mean of tokens per round, over requests that had a round; None where none had."""
    values = [committed(rounds) / len(rounds) for rounds in requests if rounds]
    return sum(values) / len(values) if values else None


def accept_length_pooled(requests: Iterable[Sequence[Verdict]]) -> float | None:
    """All tokens over all rounds; None where there was no round."""
    every = [verdict for rounds in requests for verdict in rounds]
    return committed(every) / len(every) if every else None


def judged(verdict: Verdict) -> int:
    """Drafts that were accepted or refused: all, except behind an accepted end token or the length limit."""
    return verdict.accepted if len(verdict.committed) == verdict.accepted else verdict.proposed


def survival(rounds: Sequence[Verdict], draft_tokens: int) -> list[float | None]:
    """s_j [G]: share of rounds with at least j accepted drafts, of those in which slot j was judged."""
    return [_share([v.accepted >= slot for v in rounds if judged(v) >= slot]) for slot in range(1, draft_tokens + 1)]


def conditional(rounds: Sequence[Verdict], draft_tokens: int) -> list[float | None]:
    """kappa_j [G]: acceptance of slot j, given that the slots before it were accepted; None where that never happened."""
    return [
        _share([v.accepted >= slot for v in rounds if judged(v) >= slot and v.accepted >= slot - 1])
        for slot in range(1, draft_tokens + 1)
    ]


def _share(flags: list[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def prefix_confidence(
    rounds: Sequence[Verdict], logits: Sequence[Sequence[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the confidence head said and what happened: predicted [n,G] cumulative products of sigmoid(logit), labels
    [n,G] 1 where the first j drafts were accepted, and which slots were judged [n,G]."""
    values = np.asarray(logits, dtype=np.float64)
    predicted = np.cumprod(1 / (1 + np.exp(-values)), axis=1)
    slots = np.arange(1, values.shape[1] + 1)
    labels = np.array([v.accepted for v in rounds])[:, None] >= slots
    valid = np.array([judged(v) for v in rounds])[:, None] >= slots
    return predicted, labels.astype(np.float64), valid


def reliability(predicted: np.ndarray, labels: np.ndarray, bins: int = BINS) -> list[dict[str, float]]:
    """Mean prediction, share accepted and count of every equal-width bin that is not empty."""
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    return [
        {"predicted": float(predicted[here].mean()), "accepted": float(labels[here].mean()), "count": int(here.sum())}
        for here in (place == index for index in range(bins))
        if here.any()
    ]


def ece(predicted: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float | None:
    """Expected calibration error: sum over bins of share * |mean prediction - mean label|; None without data."""
    if not len(predicted):
        return None
    return sum(
        row["count"] * abs(row["predicted"] - row["accepted"]) for row in reliability(predicted, labels, bins)
    ) / len(predicted)


def auc(predicted: np.ndarray, labels: np.ndarray) -> float | None:
    """P(prediction of an accepted one > of a refused one) + half of the ties, exact; None where one kind is missing."""
    positive = labels > 0.5
    wins, losses = int(positive.sum()), int((~positive).sum())
    if not wins or not losses:
        return None
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # mean rank of equal predictions, from 1
    return float((rank[positive].sum() - wins * (wins + 1) / 2) / (wins * losses))


def confidence_table(rounds: Sequence[Verdict], logits: Sequence[Sequence[float]]) -> dict[str, Any]:
    """ECE and AUC over all slots and by slot, and the bins of the reliability diagram."""
    if not rounds:
        return {"ece": None, "auc": None, "ece_by_slot": [], "auc_by_slot": [], "bins": [], "rounds": 0}
    predicted, labels, valid = prefix_confidence(rounds, logits)
    columns = [(predicted[valid[:, j], j], labels[valid[:, j], j]) for j in range(predicted.shape[1])]
    return {
        "ece": ece(predicted[valid], labels[valid]),
        "auc": auc(predicted[valid], labels[valid]),
        "ece_by_slot": [ece(*column) for column in columns],
        "auc_by_slot": [auc(*column) for column in columns],
        "bins": reliability(predicted[valid], labels[valid]),
        "rounds": len(rounds),
    }


def table_by(keys: Sequence[str], requests: Sequence[Sequence[Verdict]]) -> dict[str, dict[str, Any]]:
    """Accept length of the requests under each key, in order of the key."""
    out: dict[str, dict[str, Any]] = {}
    for key in sorted(set(keys)):
        mine = [rounds for name, rounds in zip(keys, requests, strict=True) if name == key]
        out[key] = {
            "accept_length": accept_length(mine),
            "accept_length_pooled": accept_length_pooled(mine),
            "requests": len(mine),
        }
    return out
