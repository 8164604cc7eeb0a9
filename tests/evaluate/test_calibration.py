"""Sequential scaling on rounds whose true confidences are known."""

from __future__ import annotations

import numpy as np
import pytest

from specgraft.decode.scheduler import Scaling
from specgraft.evaluate import calibration
from specgraft.records import Verdict

G = 4


def rounds_of(temperatures, count=20_000, seed=0, cut=0.0, shift=0.0):
    """Rounds whose slot j is accepted with chance sigmoid(logit_j / T_j + shift), and the logits; a share `cut` ends at an
    accepted end token."""
    source = np.random.default_rng(seed)
    logits = source.normal(0.5, 1.5, (count, len(temperatures)))
    taken = source.random(logits.shape) < calibration.sigmoid(logits / np.asarray(temperatures) + shift)
    accepted = taken.cumprod(1).sum(1)
    ends = source.random(count) < cut
    return [
        Verdict(int(r), tuple(range(int(r) if end and r else int(r) + 1)), len(temperatures))
        for r, end in zip(accepted, ends, strict=True)
    ], logits.tolist()


def table(rounds, logits, scaling=Scaling([1.0] * G, [0.0] * G)):  # noqa: B008
    return calibration.table(rounds, calibration.scaled(logits, scaling), G)


@pytest.mark.parametrize("true", [[1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 0.5, 1.0], [0.4, 0.4, 3.0, 2.0]])
@pytest.mark.parametrize("shift", [None, 0.0, -0.8])
def test_the_right_scaling_is_found(true, shift):
    fitted = calibration.fit(*rounds_of(true, shift=shift or 0.0), G, shift is not None)
    assert np.log(fitted.temperatures[:2]) == pytest.approx(np.log(true[:2]), abs=0.35)  # few rounds reach later slots
    assert fitted.shifts[:2] == pytest.approx([shift or 0.0] * 2, abs=0.25)
    held = rounds_of(true, seed=1, shift=shift or 0.0)
    before, after = table(*held), table(*held, fitted)
    assert max(after["ece"]) < 0.02
    assert all(value < limit + 0.01 for value, limit in zip(after["ece"], after["ece_noise"], strict=True))
    if true[0] != 1:
        assert before["ece"][0] > 0.05 > 2 * after["ece"][0]
    assert all(0.5 < value < 1 for value in after["auc"]) and all(0 < value < 0.25 for value in after["brier"])
    assert before["auc"][0] == pytest.approx(after["auc"][0], abs=1e-12), "a slot keeps its order"


def test_a_temperature_alone_does_not_mend_a_shift():
    rounds, logits = rounds_of([1.0] * G, shift=-0.8)
    assert calibration.fit(rounds, logits, G, shift=False).shifts == (0.0,) * G
    assert table(rounds, logits, calibration.fit(rounds, logits, G, shift=False))["ece"][0] > 0.05
    assert table(rounds, logits, calibration.fit(rounds, logits, G))["ece"][0] < 0.01


def test_slots_that_were_not_judged_are_left_out():
    """Rounds cut at an accepted end token say nothing about the slots behind it, whatever their logits are."""
    rounds, logits = rounds_of([2.0] * G, count=4000)
    cut = [Verdict(1, (0,), G)] * 4000
    wild = [[5.0, 30.0, -30.0, 30.0]] * 4000
    alone, both = table(rounds, logits), table(rounds + cut, logits + wild)
    assert both["ece"][1:] == alone["ece"][1:] and both["rounds"] == [8000, 4000, 4000, 4000]


def test_slots_without_data_stay_as_they_are():
    assert calibration.fit([], [], G) == Scaling((1.0,) * G, (0.0,) * G)
    rounds = [Verdict(1, (0,), G)] * 200  # all end in the first slot
    logits = np.random.default_rng(0).normal(0, 1, (200, G)).tolist()
    fitted = calibration.fit(rounds, logits, G)
    assert fitted.temperatures[1:] == (1.0,) * 3 and fitted.shifts[1:] == (0.0,) * 3 and 0 < fitted.shifts[0] <= 5
    rows = table(rounds, logits, fitted)
    assert rows["ece"][1:] == [None] * 3 and rows["rounds"] == [200, 0, 0, 0] and rows["auc"] == [None] * G
    assert calibration.table([], [], G)["ece"] == [None] * G
    assert calibration.calibration([], G)["after"]["ece"] == [None] * G


def test_scaling_keeps_the_order_of_a_slot():
    logits = np.random.default_rng(0).normal(0, 3, (100, G))
    chances = calibration.sigmoid(np.array(calibration.scaled(logits, Scaling([0.1, 0.5, 3.0, 10.0], [1.0, -1.0, 0.0, 4.0]))))
    for slot in range(G):
        assert (np.diff(chances[np.argsort(logits[:, slot]), slot]) >= 0).all()


def test_every_round_is_judged_by_a_scaling_that_has_not_seen_it():
    requests = [rounds_of([3.0, 1.0], count=400, seed=number, shift=0.7) for number in range(20)]
    found = calibration.calibration(requests, 2)
    assert found["rounds"] == [4000, 4000] and found["after"]["rounds"] == [8000, 8000]
    assert found["after"]["ece"][0] < found["temperature_alone"]["ece"][0] < found["before"]["ece"][0]
    assert 2 < found["temperatures"][0] < 4.5 and found["shifts"][0] == pytest.approx(0.7, abs=0.2)
    # the two halves contradict each other: what one teaches is wrong for the other
    opposed = [rounds_of([1.0, 1.0], count=400, seed=n, shift=(2.0, -2.0)[n % 2]) for n in range(10)]
    assert calibration.calibration(opposed, 2)["after"]["ece"][0] > 0.3
