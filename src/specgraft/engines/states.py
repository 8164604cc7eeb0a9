"""Asking a server for the hidden states of token ids. HTTP and names of files only: no torch; who asks reads the file.

Our layer id i is the output of decoder layer i, before any norm. vLLM 0.32 (run on CPUs): `engines/connector` writes a file a
request, whose header says which layers it holds. SGLang 0.5.23 (read in its source, **not tried on a GPU**): floats in the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from specgraft.engines.client import Send, Server
from specgraft.engines.install import root
from specgraft.engines.wire import Ask, Unusable

CONNECTOR = Path(__file__).with_name("connector")
ENGINES = ("vllm", "sglang")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True)
class Written:
    """What a server has for one request. Filled by `states`."""

    file: str = ""  # vLLM: name of a file in the folder that server and reader share
    rows: list[list[float]] | None = None  # SGLang: [T][layers * D]


def states_folder(folder: str | Path = "") -> Path:
    """Where servers of this machine leave states unless told otherwise."""
    return Path(folder).expanduser() if folder else root() / "states"


def vllm_flags(taps: Sequence[int], layers: int, folder: Path) -> list[str]:
    """Flags of vLLM that make it write the outputs of `taps` and of the last of `layers` layers. Its own ids are one higher."""
    ids = sorted({*taps, layers - 1})
    which = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in ids]}}
    draft = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": which}
    where = {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    transfer = {"kv_connector": "SpecgraftStates", "kv_connector_module_path": "specgraft_states", "kv_role": "kv_producer", **where}
    return ["--speculative-config", json.dumps(draft), "--kv-transfer-config", json.dumps(transfer)]


def sglang_flags(taps: Sequence[int], layers: int) -> list[str]:
    """Flags of SGLang; it starts no draft. Most of its models cannot give the last layer and say so at the first request.

    One chunk a prompt, as the answer holds the first chunk only.
    """
    ids = [str(layer) for layer in sorted({*taps, layers - 1})]
    line = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "DFLASH", "--return-aux-hidden-state-layer-ids", *ids]
    return [*line, "--chunked-prefill-size", "-1"]


def states(layers: Sequence[int], collect: Callable[[Ask, Written, Callable[[], bool]], Any], mark: str) -> Any:
    """A `Talk` of `client.Pool`: hidden states of `ask.ids` for these layers (rising ids), handed to `collect` in a thread.

    `mark` goes into the names of vLLM's files, `cmpl-<mark>-...`, so that those of a run can be told. `collect` raises Failed or
    Unusable as a talk does; what it returns is the pool's result. It gives up when its third argument says so: a thread cannot be ended.
    """
    checked: set[str] = set()

    async def talk(send: Send, server: Server, ask: Ask) -> Any:
        if server.engine not in ENGINES:
            raise Unusable(f"{server.engine} gives no hidden states: use {' or '.join(ENGINES)}")
        if server.engine == "sglang":
            if server.url not in checked:
                _refuse_other_layers(await send("GET", "/server_info", None), layers)
                checked.add(server.url)
            found = _sglang(ask, await send("POST", *_sglang_request(ask)))
        else:
            found = _vllm(ask, await send("POST", *_vllm_request(ask, server.model, mark)))
        over = threading.Event()
        try:
            return await asyncio.to_thread(collect, ask, found, over.is_set)
        finally:
            over.set()

    return talk


def _vllm_request(ask: Ask, model: str, mark: str) -> tuple[str, dict[str, Any]]:
    # one token must be asked for; a file holds the prompt's states alone
    body = {"model": model, "prompt": ask.ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    return "/v1/completions", body | {"request_id": f"{mark}-{uuid4().hex[:12]}"}


def _vllm(ask: Ask, answer: dict[str, Any]) -> Written:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    _refuse_other_ids(ask, choice.get("prompt_token_ids"))
    params = answer.get("kv_transfer_params")
    path = params.get("hidden_states_path") if isinstance(params, dict) else None
    if not isinstance(path, str):
        raise Unusable("it returns no hidden states: start it with `specgraft serve vllm TARGET --taps ...`")
    name = path.rpartition("/")[2]
    if not FILE.fullmatch(name):  # it will be read and deleted
        raise Unusable(f"its states lie in {name[:80]!r}, no name of a file of states")
    return Written(file=name)


def _sglang_request(ask: Ask) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"input_ids": ask.ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    # a key of its own for each request: a prefix that is cached would not be computed, and so not be returned
    return "/generate", body | {"return_hidden_states": True, "return_prompt_token_ids": True, "extra_key": ask.name or str(id(ask))}


def _sglang(ask: Ask, answer: dict[str, Any]) -> Written:
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    _refuse_other_ids(ask, answer.get("prompt_token_ids", meta.get("prompt_token_ids")))
    chunks = meta.get("hidden_states")
    if not isinstance(chunks, list) or not chunks or not isinstance(chunks[0], list):
        raise Unusable("it returns no hidden states: start it with `specgraft serve sglang TARGET --taps ...`")
    return Written(rows=chunks[0])


def _refuse_other_ids(ask: Ask, sent: Any) -> None:
    if sent != ask.ids:
        what = "names no prompt ids" if sent is None else "has states of other ids than were sent"
        raise Unusable(f"it {what}: it must serve the target's own tokenizer, without truncation")


def _refuse_other_layers(info: dict[str, Any], layers: Sequence[int]) -> None:
    have = info.get("return_aux_hidden_state_layer_ids")
    if have != list(layers):
        raise Unusable(f"it returns the layers {have} and {list(layers)} are wanted: start it with `specgraft serve sglang TARGET --taps ...`")
