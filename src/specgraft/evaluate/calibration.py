"""Sequential temperature scaling of the confidence head (algorithms.md 5.1 and 5.2; DSpark 3.2), and what it is worth.

Fitted on rounds in which every draft was verified: products of the confidences up to a slot against whether so many
drafts were accepted, slot by slot, each with the temperatures before it in place.
Legend: n rounds, G draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specgraft.evaluate.metrics import auc, ece, prefix_confidence
from specgraft.records import Verdict

GRID = np.logspace(-1, 1, 41)  # temperatures tried (SGLang)
FIT_BINS = 15  # of the error that is minimised (SGLang)
LEAST = 50  # judged rounds below which a slot keeps its temperature of 1

Logits = Sequence[Sequence[float]]  # [n, G]
Rounds = tuple[Sequence[Verdict], Logits]  # of one request, or of many in a row


def fit(rounds: Sequence[Verdict], logits: Logits, draft_tokens: int) -> list[float]:
    """Temperatures [G]: each minimises the calibration error of the product up to its slot, given those before it.

    Slots behind an accepted end token or the length limit are left out; a slot with too few rounds keeps 1.
    """
    temperatures = np.ones(draft_tokens)
    if not rounds:
        return temperatures.tolist()
    values = np.asarray(logits, dtype=np.float64)
    _, labels, valid = prefix_confidence(rounds, logits)
    before = np.ones(len(rounds))
    for slot in range(draft_tokens):
        here = valid[:, slot]
        if here.sum() >= LEAST:
            errors = [
                ece(before[here] * sigmoid(values[here, slot] / temperature), labels[here, slot], FIT_BINS)
                for temperature in GRID
            ]
            # where nothing can be told apart, the one nearest 1
            order = sorted(range(len(GRID)), key=lambda place: (errors[place], abs(np.log(GRID[place]))))
            temperatures[slot] = GRID[order[0]]
        before = before * sigmoid(values[:, slot] / temperatures[slot])
    return temperatures.tolist()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def scaled(logits: Logits, temperatures: Sequence[float]) -> np.ndarray:
    """Logits [n,G] over their slots' temperatures."""
    return np.asarray(logits, dtype=np.float64).reshape(-1, len(temperatures)) / np.asarray(temperatures)


def table(rounds: Sequence[Verdict], logits: Logits, temperatures: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """ECE, AUC and Brier score by slot, of cumulative products at these temperatures; None for a slot without data.

    `ece_noise` is the ECE that these very predictions would show, on as many rounds, if they were exactly right.
    """
    source = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {name: [] for name in ("ece", "ece_noise", "auc", "brier", "rounds")}
    if rounds:
        predicted, labels, valid = prefix_confidence(rounds, scaled(logits, temperatures).tolist())
    for slot in range(len(temperatures)):
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
    """Temperatures from every other request, judged on the rest (no text is on both sides), before and after.

    `temperatures`, those to be used, are fitted on all requests.
    """
    one, other = joined(requests[::2]), joined(requests[1::2])
    half = fit(*one, draft_tokens)
    return {
        "temperatures": fit(*joined(requests), draft_tokens),
        "temperatures_half": half,
        "fitted_rounds": len(one[0]),
        "judged_rounds": len(other[0]),
        "before": table(*other, [1.0] * draft_tokens),
        "after": table(*other, half),
    }
