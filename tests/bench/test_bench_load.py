"""Load on a scripted server: streams of the three engines, order, faults with the request's name, nothing lost."""

from __future__ import annotations

import time

import httpx
import pytest
from sse_server import Script, SseServer

from specgraft.bench.load import Answered, Item, Served, drive
from specgraft.engines.counters import Counters, read_counters
from specgraft.engines.wire import Ask


def items(count: int) -> list[Item]:
    return [Item("mt", f"p{number}", [10 * number, 10 * number + 1]) for number in range(count)]


def run(server: SseServer, engine: str, count: int, concurrency: int = 2, timeout: float = 1.0, vocabulary: int = 1000) -> list[Answered]:
    found: list[Answered] = []
    served = Served(server.url, engine, "m", vocabulary)
    drive(served, items(count), lambda item: Ask(item.ids, 6), concurrency, timeout, 0, found.append)
    return found


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_every_engines_stream_gives_ids_times_and_counts(engine):
    script = Script(engine)
    with SseServer(script) as server:
        found = sorted(run(server, engine, 4), key=lambda a: a.id)
    assert [a.ids for a in found] == [[10 * n + 2 + k for k in range(6)] for n in range(4)]
    for answer in found:
        assert (answer.accepted, answer.drafted) == (2, 21 if engine != "sglang" else 0) and answer.reason == "length"
        assert answer.steps == (None if engine == "llamacpp" else 3)
        assert len(answer.gaps) == 3 and 0 < answer.first <= answer.total
    assert all(body["stream"] is True for body in script.asked)


def test_no_more_than_the_concurrency_is_under_way():
    class Counting(Script):
        now = top = 0

        def pieces(self, body):
            with self.lock:
                self.now += 1
                self.top = max(self.top, self.now)
            time.sleep(0.02)
            with self.lock:
                self.now -= 1
            return super().pieces(body)

    script = Counting("llamacpp")
    with SseServer(script) as server:
        assert len(run(server, "llamacpp", 9, concurrency=3)) == 9
    assert script.top == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", "the connection broke|ended behind"),
        ("hang", "nothing came for 0.4 s"),
        ("error", "HTTP 500 .*out of memory"),
        ("no ids", "no token ids"),
        ("odd id", "id -1 came and the target has 1000 ids"),
        ("early", "ended behind 1 ids without saying why"),
    ],
)
@pytest.mark.parametrize("engine", ["llamacpp", "sglang"])
def test_a_faulty_server_stops_the_run_within_seconds_and_keeps_what_ended(engine, fault, words):
    if (engine, fault) == ("sglang", "odd id"):
        pytest.skip("the script repeats whole answers there")
    script = Script(engine)
    script.fail_at = {3: fault}
    found: list[Answered] = []
    with SseServer(script) as server:
        began = time.monotonic()
        with pytest.raises(ValueError, match=words) as error:
            drive(Served(server.url, engine, "m", 1000), items(6), lambda item: Ask(item.ids, 6), 1, 0.4, 0, found.append)
        assert time.monotonic() - began < 3
    assert "mt/p2" in str(error.value) and "\n" not in str(error.value) and "run bench again" in str(error.value)
    assert [a.id for a in found] == ["p0", "p1"]


def test_a_server_that_is_not_there():
    with pytest.raises(ValueError, match=r"mt/p0: the connection broke \(ConnectError\)"):
        drive(Served("http://127.0.0.1:9", "llamacpp"), items(1), lambda item: Ask(item.ids, 6), 1, 1.0, 0, lambda a: None)


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_counters_of_the_metrics_page_are_differences(engine):
    script = Script(engine)
    with SseServer(script) as server:
        before = read_counters(engine, httpx.get(server.url + "/metrics").text)
        run(server, engine, 4)
        after = read_counters(engine, httpx.get(server.url + "/metrics").text)
    assert before is not None and after is not None
    found = after.since(before)
    assert (found.steps, found.drafted, found.accepted, found.by_position) == (12, 84, 8, (8,))
    assert found.accept_length == pytest.approx(1 + 8 / 12) and found.survival == [pytest.approx(8 / 12)]
    with pytest.raises(ValueError, match="started anew"):
        before.since(after)


def test_a_page_without_speculation_has_no_counters():
    assert read_counters("llamacpp", "llamacpp:prompt_tokens_total 5\n# HELP x\n") is None
    assert read_counters("sglang", "anything") is None
    page = (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0\nvllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09\nvllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0\n'
    )
    assert read_counters("vllm", page) == Counters(14, 0, 0, (0, 2))
