"""When a run compiles its passes over logits."""

from __future__ import annotations

import pytest
import torch

from specgraft.config import DistillSection
from specgraft.distill import fusing

CPU = torch.device("cpu")


@pytest.mark.parametrize(("able", "steps", "settled"), [(True, 300, "on"), (True, 299, "off"), (False, 300, "off")])
def test_auto_compiles_long_runs_where_it_can(monkeypatch: pytest.MonkeyPatch, able: bool, steps: int, settled: str) -> None:
    monkeypatch.setattr(fusing, "can_fuse", lambda device: able)
    assert fusing.settle(DistillSection(), CPU, steps).fused == settled
    assert fusing.settle(DistillSection(fused="off"), CPU, steps).fused == "off"


def test_what_was_asked_for_and_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r'distill.fused="on": no C\+\+ compiler .*; install'):
        fusing.settle(DistillSection(fused="on"), CPU, 1)
