"""evaluate under a schedule: temperatures are left for later, the same prompts are decoded again, greedy text stays."""

from __future__ import annotations

import json

import pytest
from test_stage import ready  # noqa: F401

from specgraft.decode.costs import Costs
from specgraft.evaluate import scheduled, stage


@pytest.mark.parametrize("schedule", ["threshold", "prefix", "late"])
def test_evaluate_under_a_schedule(ready, tmp_path, schedule, monkeypatch, capsys):  # noqa: F811
    config, run, _ = ready
    part = config.evaluate.model_copy(update={"schedule": schedule, "threshold": 0.45, "speed_prompts": 0})
    config = config.model_copy(update={"evaluate": part})
    steep = Costs({1: {8: [(0, 1.0), (100, 80.0)]}})
    monkeypatch.setattr(scheduled, "profile", lambda *args, **kwargs: steep)
    result = stage.evaluate(config, run, tmp_path / "drafter")
    assert json.loads(run.evaluation.read_text()) == result
    assert result["scheduled"]["schedule"] == schedule
    for name in ("t0", "t1"):
        row = result["scheduled"][name]
        assert row["fixed"]["accept_length_pooled"] == result[name]["accept_length_pooled"]
        assert row["fixed"]["drafts_verified"] == 4 > row["scheduled"]["drafts_verified"]
        assert row["scheduled"]["accept_length"] <= row["fixed"]["accept_length"] + 1
        assert ("costs" in row) == (schedule != "threshold")
    assert result["scheduled"]["t0"]["differs"] == 0
    said = "".join(capsys.readouterr())
    for name in ("t0", "t1"):
        verified = result["scheduled"][name]["scheduled"]["drafts_verified"]
        assert f"schedule {schedule} at T={name[1]}: {verified:.2f} drafts verified a round (fixed 4.00)" in said
    assert said.count(", 0 texts differ") == 1
    weights = result["settings"]["weights"]
    found = scheduled.read_scalings(run.confidence, weights)
    assert found == scheduled.scalings_of(result["confidence"]["scaling"].values()) and set(found) == {0.0, 1.0}
    with pytest.raises(ValueError, match="fitted for another checkpoint"):
        scheduled.read_scalings(run.confidence, "other")
    run.confidence.write_text('{"laws": [{}]}')
    with pytest.raises(ValueError, match="damaged"):
        scheduled.read_scalings(run.confidence)


def test_a_drafter_without_confidence_is_refused_before_the_work(ready, tmp_path):  # noqa: F811
    config, run, both = ready
    both.drafter.confidence_head = None
    part = config.evaluate.model_copy(update={"schedule": "late"})
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        stage.evaluate(config.model_copy(update={"evaluate": part}), run, tmp_path / "drafter")
