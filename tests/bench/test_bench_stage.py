"""The stage on scripted servers: cells, turns, resuming, faults, words."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from sse_server import Script, SseServer

from specgraft.bench.launch import Launcher
from specgraft.bench.load import Answered, Item, Served
from specgraft.bench.stage import Cell, Plan, bench, unsteady
from specgraft.bench.table import COLUMNS, cells, show
from specgraft.bench.words import headline
from specgraft.config import BenchSection

PART = {"engine": "vllm", "temperatures": [0.0, 1.0], "concurrency": [1, 2], "repeats": 2, "max_new_tokens": 6, "timeout": 2.0}


class Servers:
    """Launches scripted servers and counts what was started and asked."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.up = self.most = 0
        self.fail_at: dict[int, str] = {}
        self.scripts: list[Script] = []

    @contextmanager
    def __call__(self, model, drafter, widest):
        script = Script("vllm", per_step=2 if drafter else 1)
        script.pages = bool(drafter)
        script.fail_at = self.fail_at
        self.scripts.append(script)
        self.started.append((model, drafter))
        self.up += 1
        self.most = max(self.most, self.up)
        with SseServer(script) as server:
            yield Served(server.url, "vllm", "m", 1000)
        self.up -= 1


def plan(**changes) -> Plan:
    items = [Item(suite, f"p{number}", [10 * number, 10 * number + 1]) for suite in ("mt", "code") for number in range(2)]
    return Plan(BenchSection(**{**PART, **changes}), {"f32": "t.gguf"}, {"dspark": "d.gguf"}, items, (99,), {"prompts": "abc"})


def test_every_cell_is_measured_and_compared(tmp_path):
    servers = Servers()
    found = bench(plan(), tmp_path, servers)
    assert servers.started == [("t.gguf", ""), ("t.gguf", "d.gguf")] and servers.most == 2
    rows = found["rows"]
    assert [(r["drafter"], r["temperature"], r["concurrency"]) for r in rows] == [
        (name, t, c) for t in (0.0, 1.0) for c in (1, 2) for name in ("none", "dspark")
    ]
    for row in rows:
        assert row["requests"] == 8 and row["tokens"] == 48 and len(row["tokens_per_second_by_repeat"]) == 2
        if row["drafter"] == "none":
            assert row["accept_length"] is None and "speedup" not in row
            continue
        assert row["accept_length"] == pytest.approx(5 / 3) and row["accept_length_pooled"] == pytest.approx(1 + 2 / 3)
        assert row["survival"] == [pytest.approx(2 / 3)] and row["speedup"] > 0 and row["break_even"] > 0
        assert row["model_check"]["model"] > 0
    assert [row["lossless"] for row in rows if "lossless" in row] == [{"prompts": 4, "differ": 0, "ties": 0, "plain_differ": 0, "gaps": []}] * 2
    assert found["suites"] == {"mt": 2, "code": 2}
    seeds = [[body["seed"] for body in script.asked if body["temperature"] == 1.0] for script in servers.scripts]
    assert sorted(seeds[0]) == sorted(seeds[1])  # the same draws for both contenders
    show(rows)
    assert all(len(cells(row)) == len(COLUMNS) for row in rows)


def test_one_after_another_for_targets_that_fit_once(tmp_path):
    servers = Servers()
    bench(plan(alternate=False, temperatures=[0.0], concurrency=[1]), tmp_path, servers)
    assert servers.started == [("t.gguf", ""), ("t.gguf", "d.gguf")] and servers.most == 1


def test_finished_cells_are_kept_over_a_fault_and_not_measured_again(tmp_path):
    servers = Servers()
    servers.fail_at = {16: "die"}  # 2 warm-up and 8 measured requests a cell and server
    with pytest.raises(ValueError, match=r"(mt|code)/p\d: "):
        bench(plan(), tmp_path, servers)
    kept = sorted(path.name for path in (tmp_path / "cells").iterdir())
    assert kept == ["f32-dspark-t0-c1.json", "f32-none-t0-c1.json"] and not (tmp_path / "bench.json").exists()
    before = {name: (tmp_path / "cells" / name).read_bytes() for name in kept}
    again = Servers()
    bench(plan(), tmp_path, again)
    assert all((tmp_path / "cells" / name).read_bytes() == content for name, content in before.items())
    assert sum(len(script.asked) for script in again.scripts) == 2 * 3 * (2 + 8) + 0
    third = Servers()
    assert bench(plan(), tmp_path, third)["rows"] and third.started == []


def test_other_settings_are_refused(tmp_path):
    bench(plan(temperatures=[0.0], concurrency=[1]), tmp_path, Servers())
    with pytest.raises(ValueError, match="measured with another `bench`; delete that folder"):
        bench(plan(temperatures=[0.0], concurrency=[1], max_new_tokens=5), tmp_path, Servers())
    for cell in (tmp_path / "cells").iterdir():
        cell.unlink()
    assert bench(plan(temperatures=[0.0], concurrency=[1], max_new_tokens=5), tmp_path, Servers())["rows"]  # nothing was measured: nothing to mix up


def test_a_target_that_is_no_gguf_file_is_refused_before_a_server_starts(tmp_path):
    launch = Launcher(BenchSection(), "llama-server", tmp_path, "float32")
    with pytest.raises(ValueError, match=r"no GGUF file of the target there; name one in bench\.models"), launch(str(tmp_path), "", 1):
        pass


@pytest.mark.parametrize("alternate", [True, False])
def test_texts_that_differ_are_counted_and_ties_are_told(tmp_path, alternate):
    started = []

    class Other(Script):
        def pieces(self, body):
            return [[token + (1 if at else 0) for token in part] for at, part in enumerate(super().pieces(body))]

    @contextmanager
    def launch(model, drafter, widest):
        started.append(drafter)
        script = Other("vllm") if drafter else Script("vllm")
        with SseServer(script) as server:
            yield Served(server.url, "vllm", "m", 1000)

    what = plan(temperatures=[0.0], concurrency=[1], alternate=alternate)
    rows = bench(what, tmp_path, launch)["rows"]
    assert rows[1]["lossless"] == {"prompts": 4, "differ": 4, "ties": 4, "plain_differ": 0, "gaps": [pytest.approx(0.005)] * 4}
    assert started == ["", "d.gguf"] + [""] * (not alternate)  # where only one fits, the plain one is started again
    assert bench(what, tmp_path, launch)["rows"] == rows and len(started) == 3 - alternate


def row(model: str, speedup: float, **more):
    return {"model": model, "drafter": "d", "speedup": speedup, "accept_length_pooled": 1.5, **more}


def test_losses_are_said_first_with_reason_and_best_length():
    single = {"break_even": 3.1, "verify_ms": 20.0, "step_ms": 31.0, "best": {"draft_tokens": 0, "at": 1, "speedup": 0.9}}
    found = headline([row("q4", 0.5, **single), row("q4", 0.8), row("f32", 1.2), row("f32", 0.9), row("bf16", 1.1), {"model": "q4", "drafter": "none"}])
    assert [(one["model"], one["low"], one["high"]) for one in found] == [("q4", 0.5, 0.8), ("bf16", 1.1, 1.1), ("f32", 0.9, 1.2)]
    said = [one["text"] for one in found]
    assert said[0].startswith("q4 with d: speculation loses everywhere (0.50 to 0.80 times plain decoding); one at a time a step takes as long as 3.10 plain ones and commits 1.50 tokens")
    assert said[0].endswith("No draft length pays; the least bad is 1, 0.90 times plain, prefill left out.")
    assert said[1] == "bf16 with d: 1.10 to 1.10 times plain decoding." and said[2].startswith("f32 with d: speculation loses in 1 of 2 cells")


def test_texts_of_an_engine_that_differ_without_a_drafter_are_told():
    def cell(*texts):
        return Cell([Answered("a", str(n % 2), n // 2, ids, "length", 0.1, 1.0) for n, ids in enumerate(texts)], [1.0], None)

    one, eight = cell([1], [2], [1], [2]), cell([1], [3], [1], [2])
    assert unsteady([one]) == 0 and unsteady([eight, one]) == 1
