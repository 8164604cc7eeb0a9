"""Metrics on hand-made rounds."""

from __future__ import annotations

import numpy as np
import pytest

from specgraft.evaluate import metrics
from specgraft.records import Verdict


def verdict(accepted, cut=False, proposed=3):
    return Verdict(accepted, tuple(range(accepted + (0 if cut else 1))), proposed)


REQUESTS = [[verdict(3), verdict(0)], [verdict(1)], [verdict(2, cut=True), verdict(0), verdict(0)], []]


def test_accept_length_request_mean_and_pooled():
    # requests: 5 tokens in 2 rounds, 2 in 1, 4 in 3; a request without rounds has no accept length
    assert metrics.accept_length(REQUESTS) == pytest.approx((2.5 + 2 + 4 / 3) / 3)
    assert metrics.accept_length_pooled(REQUESTS) == pytest.approx(11 / 6)
    assert metrics.accept_length([[]]) is None and metrics.accept_length_pooled([]) is None


def test_survival_and_conditional_leave_unjudged_slots_out():
    rounds = [v for request in REQUESTS for v in request]
    assert metrics.survival(rounds, 3) == [pytest.approx(3 / 6), pytest.approx(2 / 6), pytest.approx(1 / 5)]
    assert metrics.conditional(rounds, 3) == [pytest.approx(3 / 6), pytest.approx(2 / 3), 1.0]
    assert metrics.conditional([verdict(0)], 3) == [0.0, None, None]


def test_accept_length_is_one_plus_survival_when_nothing_is_cut():
    rounds = [verdict(r) for r in (0, 3, 1, 2, 2, 0, 3)]
    assert metrics.accept_length_pooled([rounds]) == pytest.approx(1 + sum(metrics.survival(rounds, 3)))


def test_calibration_golden():
    predicted = np.array([0.1, 0.1, 0.9, 0.9])
    labels = np.array([0.0, 0.0, 1.0, 0.0])
    assert metrics.ece(predicted, labels) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    assert metrics.auc(predicted, labels) == pytest.approx((2 + 0.5) / 3)
    assert metrics.auc(predicted, np.zeros(4)) is None and metrics.ece(np.array([]), np.array([])) is None
    assert metrics.reliability(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == [
        {"predicted": 0.0, "accepted": 0.0, "count": 1},
        {"predicted": 1.0, "accepted": 1.0, "count": 1},
    ]


def test_confidence_uses_cumulative_products_and_judged_slots():
    rounds = [verdict(2, cut=True), verdict(1)]
    predicted, labels, valid = metrics.prefix_confidence(rounds, [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert predicted.tolist() == [[0.5, 0.25, 0.125]] * 2
    assert labels.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert valid.tolist() == [[True, True, False], [True, True, True]]
    table = metrics.confidence_table(rounds, [[0.0] * 3] * 2)
    assert table["ece_by_slot"] == [pytest.approx(0.5), pytest.approx(0.25), pytest.approx(0.125)]
    assert sum(row["count"] for row in table["bins"]) == 5
    assert metrics.confidence_table([], [])["bins"] == []


def test_tables_by_key():
    table = metrics.table_by(["code", "chat", "chat", "math"], REQUESTS)
    assert list(table) == ["chat", "code", "math"]
    assert table["chat"] == {
        "accept_length": pytest.approx((2 + 4 / 3) / 2),
        "accept_length_pooled": pytest.approx(6 / 4),
        "requests": 2,
    }
    assert table["math"]["accept_length"] is None
