"""vLLM's hidden states as files that say what they hold. vLLM itself loads this module, in its own environment (0.32.0).

It imports nothing of specgraft, and lies in a folder of its own because that folder goes on vLLM's PYTHONPATH. Unlike vLLM's
example connector, from which it inherits, it also runs on CPUs, writes aside and renames, names the layers in the file, says
in the lock file why a file could not be written, and lets a full disk fail a request, not the server.
"""

from __future__ import annotations

import fcntl
import json
import os
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.logger import init_logger

logger = init_logger(__name__)


class Copied:
    """In the place of a CUDA event: the copy is complete."""

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class SpecgraftStates(ExampleHiddenStatesConnector):
    """Writes FOLDER/<request>.safetensors: `hidden_states` [T, layers, D] in the model's dtype, `token_ids` [T]."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        taps = list(vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        if taps != sorted(set(taps)) or taps[0] < 1:  # vLLM would sort them and drop doubles without a word
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={taps}: give rising ids from 1 on")
        model = vllm_config.model_config
        # vLLM counts what goes into a layer: its i is the output of layer i - 1, also behind the last one, before the norm
        note = {"layer_ids": "output of layer i, pre-norm", "layers": [tap - 1 for tap in taps], "model": str(model.model)}
        self.note = {"specgraft": json.dumps(note)}

    def wait_for_save(self) -> None:
        try:
            super().wait_for_save()
        except OSError as error:
            logger.error("no lock file could be made: %s", error)

    def _submit_async_write(self, pending: PendingSave) -> None:
        cache = self._kv_cache
        try:
            if cache is not None and cache.device.type == "cpu":
                self._submit_from_cpu(pending, cache)
            else:
                super()._submit_async_write(pending)
        except OSError as error:  # the client finds no file; the blocks must be given back all the same
            logger.error("states of %s are not written: %s", pending.req_id, error)
            self._req_copy_events[pending.req_id] = Copied()

    def _submit_from_cpu(self, pending: PendingSave, cache: torch.Tensor) -> None:
        if not self._is_tp_rank_zero:
            return
        places = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size + places).flatten()
        states = extract_from_kv_cache(cache, slots, len(pending.token_ids)).contiguous().clone()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        future = self._executor.submit(self._write_tensors, tensors, Copied(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = Copied()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """In a writer's thread. The example's is a static method; its caller names it through `self`."""
        aside = f"{filename}.part"
        try:
            event.synchronize()
            save_file(tensors, aside, metadata=self.note)
            os.replace(aside, filename)
        except BaseException as error:
            if os.path.exists(aside):  # its space may be what is missing
                os.unlink(aside)
            if lock_fd is not None:
                os.write(lock_fd, str(error).encode()[:400])
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # lets the reader go on
