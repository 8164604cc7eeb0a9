"""A device that works is told from one that waits."""

from __future__ import annotations

import time

import pytest
import torch

from specgraft.train.device import Activity


def test_a_processor_that_waits_is_told_from_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    waiting = Activity(torch.device("cpu"))
    time.sleep(0.2)
    idle = waiting.told()["device_activity"]
    working = Activity(torch.device("cpu"))
    while time.process_time() - working.processor < 0.2:
        pass
    assert 0 <= idle < 0.5 and idle < working.told()["device_activity"] <= 1
    monkeypatch.setattr(time, "process_time", lambda: working.processor + 1e3)  # threads that are not torch's
    assert working.told() == {"device_activity": 1.0}


def test_a_gpu_says_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 37)
    assert activity.told() == {"device_activity": 0.37}

    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert activity.told() == {}
    assert Activity(torch.device("meta")).told() == {}
