"""Sequential scaling of the confidence head (algorithms.md 5.1 and 5.2; DSpark 3.2), and what it is worth.

Fitted on rounds in which every draft was verified: products of the confidences up to a slot against whether so many
drafts were accepted, slot by slot, each with those before it in place.
Legend: n rounds, G draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specgraft.decode.scheduler import Scaling
from specgraft.evaluate.metrics import auc, ece, prefix_confidence
from specgraft.records import Verdict

GRID = np.logspace(-1, 1, 41)  # temperatures tried (SGLang)
FIT_BINS = 15  # of the error that is minimised (SGLang)
FAR = 5.0  # largest shift
LEAST = 50  # judged rounds below which a slot is left as it is

Logits = Sequence[Sequence[float]]  # [n, G]
Rounds = tuple[Sequence[Verdict], Logits]  # of one request, or of many in a row


def fit(rounds: Sequence[Verdict], logits: Logits, draft_tokens: int, shift: bool = True) -> Scaling:
    """T_j and b_j [G]: each minimises the error of the product up to its slot, given the slots before it.

    With `shift`, b_j is such that mean prediction and mean label of the slot agree; a temperature alone (DSpark) turns the
    logits about 0 and cannot mend a head that is too sure by the same amount everywhere, as one is that has seen its prompts.
    Slots behind an accepted end token or the length limit are left out; a slot with too few rounds keeps 1 and 0.
    """
    temperatures, shifts = np.ones(draft_tokens), np.zeros(draft_tokens)
    if rounds:
        values = np.asarray(logits, dtype=np.float64)
        _, labels, valid = prefix_confidence(rounds, logits)
        before = np.ones(len(rounds))
        for slot in range(draft_tokens):
            here = valid[:, slot]
            if here.sum() >= LEAST:
                temperatures[slot], shifts[slot] = _slot(before[here], values[here, slot], labels[here, slot], shift)
            before = before * sigmoid(values[:, slot] / temperatures[slot] + shifts[slot])
    return Scaling(tuple(temperatures.tolist()), tuple(shifts.tolist()))


def _slot(before: np.ndarray, logits: np.ndarray, labels: np.ndarray, shift: bool) -> tuple[float, float]:
    """The best T of the grid and its b, for products before [n] and logits [n] of one slot.

    A temperature alone is chosen by ECE. With a shift ECE hardly tells a sharp slot from a flat one, and log loss is used.
    """
    tried = []
    for temperature in GRID:
        offset = _level(before, logits / temperature, labels.mean()) if shift else 0.0
        predicted = before * sigmoid(logits / temperature + offset)
        error = log_loss(predicted, labels) if shift else ece(predicted, labels, FIT_BINS)
        # where nothing can be told apart, the one nearest 1
        tried.append((error, abs(np.log(temperature)), float(temperature), offset))
    return min(tried)[2:]


def log_loss(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log of what was said of what happened."""
    said = np.where(labels > 0.5, predicted, 1 - predicted)
    return float(-np.log(np.maximum(said, 1e-12)).mean())


def _level(before: np.ndarray, logits: np.ndarray, wanted: float) -> float:
    """b at which the mean of before * sigmoid(logits + b) is `wanted`, by bisection; at most `FAR` either way."""
    low, high = -FAR, FAR
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if (before * sigmoid(logits + middle)).mean() > wanted else (middle, high)
    return (low + high) / 2


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def scaled(logits: Logits, scaling: Scaling) -> list[list[float]]:
    """logit / T_j + b_j [n,G]."""
    return (np.asarray(logits, dtype=np.float64) / scaling.temperatures + scaling.shifts).tolist()


def table(rounds: Sequence[Verdict], logits: Logits, draft_tokens: int, seed: int = 0) -> dict[str, list[Any]]:
    """ECE, AUC and Brier score by slot, of cumulative products of sigmoid(logits); None for a slot without data.

    `ece_noise` is the ECE that these very predictions would show, on as many rounds, if they were exactly right.
    """
    source = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {name: [] for name in ("ece", "ece_noise", "auc", "brier", "rounds")}
    if rounds:
        predicted, labels, valid = prefix_confidence(rounds, logits)
    for slot in range(draft_tokens):
        here = valid[:, slot] if rounds else np.zeros(0, dtype=bool)
        p, y = (predicted[here, slot], labels[here, slot]) if here.any() else (np.zeros(0), np.zeros(0))
        rows["ece"].append(ece(p, y))
        rows["ece_noise"].append(noise(p, source))
        rows["auc"].append(auc(p, y))
        rows["brier"].append(float(np.mean((p - y) ** 2)) if len(p) else None)
        rows["rounds"].append(len(p))
    return rows


def noise(predicted: np.ndarray, source: np.random.Generator, draws: int = 20) -> float | None:
    """Mean ECE of labels drawn from the predictions themselves."""
    if not len(predicted):
        return None
    found = [ece(predicted, (source.random(len(predicted)) < predicted).astype(np.float64)) for _ in range(draws)]
    return float(np.mean(np.array(found, dtype=np.float64)))


def joined(requests: Sequence[Rounds]) -> Rounds:
    """All rounds of these requests."""
    return [v for rounds, _ in requests for v in rounds], [row for _, logits in requests for row in logits]


def calibration(requests: Sequence[Rounds], draft_tokens: int) -> dict[str, Any]:
    """The scaling to be used, fitted on all requests, and what fitting is worth on requests that were not fitted on.

    Twice: every other request is fitted on and the rest judged, then the other way round, so every round is judged once by a
    scaling that has not seen its text. `before`: no scaling; `temperature_alone`: DSpark's; `after`: with shifts.
    """
    parts = [joined(requests[::2]), joined(requests[1::2])]
    tables = {"before": table(*joined(requests), draft_tokens)}
    for name, shift in (("temperature_alone", False), ("after", True)):
        judged: list[Rounds] = []
        for (rounds, logits), other in zip(parts, reversed(parts), strict=True):
            if rounds:
                judged.append((rounds, scaled(logits, fit(*other, draft_tokens, shift))))
        tables[name] = table(*joined(judged), draft_tokens)
    final = fit(*joined(requests), draft_tokens)
    return {
        "temperatures": list(final.temperatures),
        "shifts": list(final.shifts),
        "rounds": [len(part[0]) for part in parts],
        **tables,
    }
