"""The module that vLLM loads, with a stand-in for the part of vLLM that it inherits from: gathering, writing, failing."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from specgraft.capture.states_file import take_states
from specgraft.engines.states import CONNECTOR
from specgraft.engines.wire import Failed

BLOCK, LAYERS, WIDTH = 4, 3, 5


@dataclass
class PendingSave:
    req_id: str
    filename: str
    token_ids: torch.Tensor
    block_ids: list[int]


class Example:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_cache: Any = None
        self._block_size, self._is_tp_rank_zero, self.use_lock = BLOCK, True, True
        self._executor = ThreadPoolExecutor(1)
        self._lock_fds: dict[str, int] = {}
        self._req_futures: dict[str, Any] = {}
        self._req_copy_events: dict[str, Any] = {}
        self.errors: list[BaseException] = []

    def _on_write_done(self, req_id: str, future: Any) -> None:
        if error := future.exception():
            self.errors.append(error)

    def wait_for_save(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def extract(cache: torch.Tensor, slots: torch.Tensor, tokens: int) -> torch.Tensor:
    size = cache.shape[2]
    return cache[slots // size, :, slots % size][:tokens]


@pytest.fixture
def connector(monkeypatch):
    """The module, loaded as vLLM does: by its name, from its folder."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    example = ModuleType(name)
    vars(example).update(ExampleHiddenStatesConnector=Example, PendingSave=PendingSave, extract_from_kv_cache=extract)
    logger = ModuleType("vllm.logger")
    vars(logger)["init_logger"] = getLogger
    parts = name.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, name, example)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    spec = importlib.util.spec_from_file_location("specgraft_states", CONNECTOR / "specgraft_states.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(connector: ModuleType, taps: list[int]) -> Any:
    hf = SimpleNamespace(eagle_aux_hidden_state_layer_ids=taps)
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf))
    return connector.SpecgraftStates(SimpleNamespace(speculative_config=spec, model_config=SimpleNamespace(model="m")), None, None)


def pending(folder: Path, blocks: list[int], tokens: int) -> PendingSave:
    return PendingSave("r", str(folder / "states" / "r.safetensors"), torch.arange(100, 100 + tokens), blocks)


def test_states_are_gathered_by_block_and_the_file_names_our_layers(connector, tmp_path):
    mine = made(connector, [2, 9, 30])
    mine._kv_cache = torch.randn(6, LAYERS, BLOCK, WIDTH, generator=torch.Generator().manual_seed(0))
    mine._submit_async_write(pending(tmp_path, [5, 1, 3], 10))
    mine._executor.shutdown()
    found = take_states(tmp_path / "states" / "r.safetensors", 5.0)
    wanted = torch.stack([mine._kv_cache[block, :, place] for block in (5, 1, 3) for place in range(BLOCK)])[:10]
    assert torch.equal(found.states, wanted) and found.ids == list(range(100, 110)) and found.layers == [1, 8, 29]
    assert mine._req_copy_events["r"].query() and not mine.errors and not list((tmp_path / "states").iterdir())


def test_a_full_disk_is_told_to_the_reader_and_leaves_nothing(connector, tmp_path, monkeypatch):
    mine = made(connector, [2])

    def full(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(connector, "save_file", full)
    mine._kv_cache = torch.zeros(2, 1, BLOCK, WIDTH)
    mine._submit_async_write(pending(tmp_path, [1], 3))
    mine._executor.shutdown()
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["r.safetensors.lock"] and len(mine.errors) == 1
    with pytest.raises(Failed, match=r"its states were not written \(\[Errno 28\] No space left on device\)"):
        take_states(tmp_path / "states" / "r.safetensors", 5.0)


def test_a_disk_too_full_for_a_lock_does_not_end_the_server(connector, tmp_path, monkeypatch):
    mine = made(connector, [2])
    mine._kv_cache = torch.zeros(2, 1, BLOCK, WIDTH)
    mine.wait_for_save()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(connector.os, "makedirs", lambda *_, **__: refuse())
    mine._submit_async_write(pending(tmp_path, [1], 3))
    assert mine._req_copy_events["r"].query()  # its blocks are given back


def test_a_lock_that_was_made_before_the_answer_is_held_until_the_file_is_there(connector, tmp_path):
    mine = made(connector, [2])
    mine._kv_cache = torch.ones(2, 1, BLOCK, WIDTH)
    save = pending(tmp_path, [1], 3)
    Path(save.filename).parent.mkdir()
    lock = connector.os.open(save.filename + ".lock", connector.os.O_CREAT | connector.os.O_WRONLY, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    mine._lock_fds["r"] = lock
    mine._submit_async_write(save)
    assert take_states(Path(save.filename), 5.0).states.shape == (3, 1, WIDTH) and not mine._lock_fds


@pytest.mark.parametrize("taps", [[9, 2], [2, 2], [0, 2]])
def test_ids_that_vllm_would_sort_or_drop_are_refused(connector, taps):
    with pytest.raises(ValueError, match="give rising ids from 1 on"):
        made(connector, taps)


def test_other_ranks_write_nothing(connector, tmp_path):
    mine = made(connector, [2])
    mine._kv_cache, mine._is_tp_rank_zero = torch.ones(2, 1, BLOCK, WIDTH), False
    mine._submit_async_write(pending(tmp_path, [1], 3))
    assert not (tmp_path / "states").exists() and json.loads(mine.note["specgraft"])["layers"] == [1]
