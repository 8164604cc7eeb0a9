"""Sequential temperature scaling on rounds whose true confidences are known."""

from __future__ import annotations

import numpy as np
import pytest

from specgraft.evaluate import calibration
from specgraft.records import Verdict

G = 4


def rounds_of(temperatures, count=20_000, seed=0, cut=0.0):
    """Rounds whose slot j is accepted with chance sigmoid(logit_j / T_j), and the logits; a share `cut` ends at an
    accepted end token."""
    source = np.random.default_rng(seed)
    logits = source.normal(0.5, 1.5, (count, len(temperatures)))
    taken = source.random(logits.shape) < calibration.sigmoid(logits / np.asarray(temperatures))
    accepted = taken.cumprod(1).sum(1)
    ends = source.random(count) < cut
    return [
        Verdict(int(r), tuple(range(int(r) if end and r else int(r) + 1)), len(temperatures))
        for r, end in zip(accepted, ends, strict=True)
    ], logits.tolist()


@pytest.mark.parametrize("true", [[1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 0.5, 1.0], [0.4, 0.4, 3.0, 2.0]])
@pytest.mark.parametrize("cut", [0.0, 0.3])
def test_the_right_temperatures_are_found(true, cut):
    fitted = calibration.fit(*rounds_of(true), G)
    assert np.log(fitted[:2]) == pytest.approx(np.log(true[:2]), abs=0.35)  # later slots: few rounds reach them
    held = rounds_of(true, seed=1, cut=cut)
    before, after = calibration.table(*held, [1.0] * G), calibration.table(*held, fitted)
    if not cut:
        assert max(after["ece"]) < 0.02
        assert all(value < limit + 0.01 for value, limit in zip(after["ece"], after["ece_noise"], strict=True))
    if true[0] != 1:
        assert before["ece"][0] > 0.05 > 2 * after["ece"][0]
    assert all(0.5 < value < 1 for value in after["auc"]) and all(0 < value < 0.25 for value in after["brier"])
    assert before["auc"][0] == pytest.approx(after["auc"][0], abs=1e-12), "one temperature keeps the order of its slot"


def test_slots_that_were_not_judged_are_left_out():
    """Rounds cut at an accepted end token say nothing about the slots behind it, whatever their logits are."""
    rounds, logits = rounds_of([2.0] * G, count=4000)
    cut = [Verdict(1, (0,), G)] * 4000
    wild = [[5.0, 30.0, -30.0, 30.0]] * 4000
    alone = calibration.table(rounds, logits, [1.0] * G)
    both = calibration.table(rounds + cut, logits + wild, [1.0] * G)
    assert both["ece"][1:] == alone["ece"][1:] and both["rounds"] == [8000, 4000, 4000, 4000]


def test_slots_without_data_keep_their_temperature():
    assert calibration.fit([], [], G) == [1.0] * G
    rounds = [Verdict(1, (0,), G)] * 200  # all end in the first slot
    logits = np.random.default_rng(0).normal(0, 1, (200, G)).tolist()
    fitted = calibration.fit(rounds, logits, G)
    assert fitted[1:] == [1.0] * 3
    rows = calibration.table(rounds, logits, fitted)
    assert rows["ece"][1:] == [None] * 3 and rows["rounds"] == [200, 0, 0, 0] and rows["auc"] == [None] * G
    assert calibration.table([], [], [1.0] * G)["ece"] == [None] * G


def test_scaling_keeps_the_order_of_a_slot():
    logits = np.random.default_rng(0).normal(0, 3, (100, G))
    chances = calibration.sigmoid(calibration.scaled(logits, [0.1, 0.5, 3.0, 10.0]))
    for slot in range(G):
        assert (np.diff(chances[np.argsort(logits[:, slot]), slot]) >= 0).all()


def test_one_half_is_fitted_and_the_other_judged():
    requests = []
    for number in range(20):
        rounds, logits = rounds_of([3.0, 1.0], count=400, seed=number)
        requests.append((rounds, logits))
    found = calibration.calibration(requests, 2)
    assert found["fitted_rounds"] == found["judged_rounds"] == 4000
    assert found["after"]["ece"][0] < found["before"]["ece"][0] / 3
    one = calibration.fit(*calibration.joined(requests[::2]), 2)
    assert found["temperatures_half"] == one and 2 < found["temperatures"][0] < 4.5
