"""Results are merged by name and whole; a failed gate stops a run with its figure and the way around; judging gates."""

from __future__ import annotations

import json

import pytest

from specgraft.check.agreement import agreement
from specgraft.check.gates import NAMES, GateError, record, require
from specgraft.check.lossless import lossless
from specgraft.check.overfit import overfit, whole_rounds
from specgraft.records import GateResult, Verdict
from specgraft.run_dir import RunDir


def result(name: str, passed: bool = True, detail: str = "figure 0.5") -> GateResult:
    return GateResult(name, passed, detail, {"x": 0.5})


def test_record_merges_by_name(tmp_path):
    run = RunDir(tmp_path)
    record(run, [result("lossless"), result("tap identity", False)])
    record(run, [result("token identity"), result("tap identity", True, "again")])
    rows = json.loads(run.gates.read_text())["gates"]
    assert [row["name"] for row in rows] == ["token identity", "tap identity", "lossless"]
    assert rows[1] == {"name": "tap identity", "passed": True, "detail": "again", "measured": {"x": 0.5}}
    assert [path.name for path in tmp_path.iterdir()] == ["gates.json"]


def test_allowed_failures_are_recorded(tmp_path):
    run = RunDir(tmp_path)
    results = [result("tap identity", False), result("lossless")]
    rows = record(run, results, {"tap identity", "lossless"})
    assert [row.get("allowed") for row in rows] == [True, None]
    require(results, {"tap identity"})
    rows = record(run, [result("tap identity")])
    assert "allowed" not in rows[0]


def test_require_names_the_gate_the_figure_and_the_way_around():
    require([result(name) for name in NAMES])
    with pytest.raises(GateError) as error:
        require([result("agreement", False), result("overfit", False), result("lossless")], {"overfit"})
    assert str(error.value) == "gate 'agreement' failed: figure 0.5. To go on all the same: --allow \"agreement\""
    assert isinstance(error.value, ValueError)
    with pytest.raises(ValueError, match="no such gate; the gates are token identity, tap identity") as unknown:
        require([], {"taps"})
    assert not isinstance(unknown.value, GateError)


def test_damaged_gates_file(tmp_path):
    run = RunDir(tmp_path)
    for text in ("{", "[]", '{"gates": [1]}'):
        run.gates.write_text(text)
        with pytest.raises(ValueError, match="damaged; delete it"):
            record(run, [result("lossless")])
        assert run.gates.read_text() == text


def test_overfit_leaves_the_last_round_out():
    full = Verdict(7, tuple(range(8)), 7)
    cut = Verdict(1, (1, 2), 7)
    assert whole_rounds([full, full, cut]) == 8.0
    assert whole_rounds([cut]) is None and whole_rounds([]) is None
    assert overfit(7.6, 7).passed and not overfit(7.59, 7).passed
    assert not overfit(None, 7).passed and "not run" in overfit(None, 7).detail


def test_agreement():
    assert agreement(1.68, 1.6).passed and not agreement(1.69, 1.6).passed
    assert agreement(1.69, 1.6, 0.1).passed
    assert agreement(1.52, 1.6).passed and not agreement(1.51, 1.6).passed
    assert "not run" in agreement(None, 1.6).detail and not agreement(1.6, None).passed


def test_lossless():
    same = {
        "prompts": 100,
        "tokens": 12000,
        "mismatches": 0,
        "ties": 1,
        "details": [{"prompt_id": "a", "position": 3, "tie": True}],
    }
    good = lossless({"t0": {"lossless": same}})
    assert good.passed and good.detail == "0 mismatches and 1 ties on 100 prompts, 12000 tokens"
    details = [*same["details"], {"prompt_id": "b", "position": 9, "tie": False}]
    bad = lossless({"t0": {"lossless": same | {"mismatches": 1, "details": details}}})
    assert not bad.passed and bad.detail.endswith("first: b at token 9")
    for nothing in ({}, {"t0": None}, {"t0": {"lossless": same | {"prompts": 0}}}):
        assert not lossless(nothing).passed and "not run" in lossless(nothing).detail
