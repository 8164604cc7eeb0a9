"""The pool of servers: ids in, ids out, at most so many under way, nothing lost or asked twice when a server fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine_stub import END, StubServer, counting
from specgraft.engines.client import Ask, Pool, Reply, base_url

ENGINES = ["llamacpp", "vllm", "sglang"]


def asks(number: int, limit: int = 20) -> list[Ask]:
    return [Ask([index + 3, 7, index], limit, stop_ids=(END,)) for index in range(number)]


def gather(pool: Pool, wanted: list[Ask]) -> dict[int, Reply]:
    found: dict[int, Reply] = {}

    def done(index: int, reply: Reply) -> None:
        assert index not in found
        found[index] = reply

    pool.run(wanted, done)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_go_in_and_come_out(engine):
    wanted = asks(20)
    with StubServer(engine) as server:
        found = gather(Pool([server.url], concurrency=4), wanted)
        assert server.most <= 4
    assert {index: reply.ids for index, reply in found.items()} == {i: counting(ask.ids) for i, ask in enumerate(wanted)}
    assert {reply.finish_reason for reply in found.values()} == {"stop"}
    assert sorted(server.asked) == sorted(ask.ids for ask in wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_is_cut_at_the_limit(engine):
    with StubServer(engine, lambda ids: list(range(10, 40))) as server:
        found = gather(Pool([server.url]), asks(2, limit=5))
    assert [found[0].ids, found[0].finish_reason] == [list(range(10, 15)), "length"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_end_token_that_the_engine_trims_is_put_back_where_it_names_it(engine):
    with StubServer(engine, keep_end=False) as server:
        found = gather(Pool([server.url]), asks(3))
    assert all(reply.ids == counting(ask.ids) for reply, ask in zip([found[i] for i in range(3)], asks(3), strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_end_token_of_the_engine_alone_does_not_end_the_answer(engine):
    whole = [11, 12, 4, 13, 14, END]  # 4 ends a turn for the engine, not for the target

    def answer(ids: list[int]) -> list[int]:
        return whole[len(ids) - 3 :]

    with StubServer(engine, answer, stop_ids=(4, END)) as server:
        found = gather(Pool([server.url]), asks(1))
    assert found[0] == Reply(whole, "stop")
    assert len(server.asked) == 2 and server.asked[1] == [3, 7, 0, 11, 12, 4]
    limits = [body.get("n_predict") or body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in server.bodies]
    assert limits == [20, 17]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_goes_on_behind_the_end_token_of_the_engine_up_to_its_limit(engine):
    with StubServer(engine, lambda ids: [4], stop_ids=(4,)) as server:
        found = gather(Pool([server.url]), asks(1, limit=3))
    assert found[0] == Reply([4, 4, 4], "length")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_target_ends_with_ends_an_answer_that_the_engine_goes_on_with(engine):
    with StubServer("llamacpp", lambda ids: [11, END, 12, 13, 14, 15], stop_ids=()) as server:
        assert gather(Pool([server.url]), asks(1, limit=6))[0] == Reply([11, END], "stop")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_without_token_ids_is_refused(engine):
    with StubServer(engine, ids=False) as server, pytest.raises(ValueError, match=r"no token ids.*never encoded again") as error:
        gather(Pool([server.url]), asks(5))
    assert server.url in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_short_of_its_limit_without_an_end_is_refused(engine):
    with (
        StubServer(engine, lambda ids: [11, 12], stop_ids=()) as server,
        pytest.raises(ValueError, match="without an end token: give the server a context of 23 or more"),
    ):
        gather(Pool([server.url]), asks(1))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_an_error_is_tried_again(status):
    with StubServer(errors={1: status, 3: status, 4: status}) as server:
        found = gather(Pool([server.url], concurrency=2, backoff=0.02), asks(6))
    assert sorted(found) == list(range(6)) and len(server.asked) == 9


def test_an_error_that_stays_stops_the_run_after_the_rest_was_handed_over():
    def answer(ids: list[int]) -> list[int]:
        if ids[2] == 1:
            raise RuntimeError  # the connection breaks off, each time
        return counting(ids)

    found: dict[int, Reply] = {}
    with StubServer(answer=answer) as server:
        with pytest.raises(ValueError, match=r"no connection .* \(3 tries\); see to the server and start again") as error:
            Pool([server.url], concurrency=1, retries=2, backoff=0.01).run(asks(3), found.__setitem__)
        assert sum(ids[2] == 1 for ids in server.asked) == 3
    assert 0 in found and 1 not in found and "\n" not in str(error.value)


def test_a_request_that_is_wrong_is_not_tried_again():
    with (
        StubServer(errors={1: 400}) as server,
        pytest.raises(ValueError, match="refuses the request: HTTP 400 scripted error 400"),
    ):
        gather(Pool([server.url], backoff=0.01), asks(1))
    assert len(server.asked) == 1


def test_no_server_at_all():
    with StubServer() as server:
        url = server.url
    with pytest.raises(ValueError, match=rf"{url}: no connection \(ConnectError\) \(4 tries\)"):
        Pool([url], backoff=0.01).run(asks(50), lambda *_: None)


def test_a_server_that_dies_is_replaced_by_the_others():
    wanted = asks(30)
    with StubServer(kill_after=5, delay=0.005) as first, StubServer("llamacpp", delay=0.005) as second:
        began = time.monotonic()
        found = gather(Pool([first.url, second.url], concurrency=3), wanted)
        assert time.monotonic() - began < 10  # no waiting for the dead one
    assert {index: reply.ids for index, reply in found.items()} == {i: counting(ask.ids) for i, ask in enumerate(wanted)}
    assert len(first.asked) >= 5 and len(second.asked) >= 20


def test_a_server_that_is_restarted_goes_on_and_nothing_is_answered_twice(capsys):
    wanted = asks(40)
    with StubServer(kill_after=17, delay=0.002) as server:

        def restart() -> None:
            while server.http is not None:
                time.sleep(0.01)
            time.sleep(0.2)
            server.restart()

        threading.Thread(target=restart, daemon=True).start()
        found = gather(Pool([server.url], concurrency=4, retries=8, backoff=0.05), wanted)
    assert sorted(found) == list(range(40))
    # those under way at the kill were asked once more, no others
    assert 40 < len(server.asked) <= 40 + 4 + 8
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"{server.url}: no connection (") and told[0].endswith("; asked again in 0.05 s")
    assert told[-1] == f"{server.url}: answers again"


def test_a_slow_request_is_asked_elsewhere():
    with StubServer(delay=lambda ids: 1.0 if ids[2] == 2 else 0.0) as slow, StubServer() as quick:
        found = gather(Pool([slow.url, quick.url], concurrency=1, timeout=0.3, backoff=0.02), asks(6))
    assert sorted(found) == list(range(6))


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing, as one that hangs does."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        yield f"http://127.0.0.1:{port.getsockname()[1]}"


def test_a_silent_server_is_given_up_long_before_a_request_has_to_be_answered(silent):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"it does not say that it is there, asked twice for 0\.1 s \(2 tries\)"):
        gather(Pool([silent], timeout=60, retries=1, backoff=0.01, silence=0.1), asks(5))
    assert time.monotonic() - began < 5
    with StubServer() as server:
        assert len(gather(Pool([silent, server.url], timeout=60, backoff=0.01, silence=0.4), asks(5))) == 5


def test_a_slow_server_that_says_that_it_is_there_is_waited_for():
    with StubServer(delay=1.3) as server:
        assert len(gather(Pool([server.url], retries=0, silence=0.5), asks(1))) == 1


def test_a_run_that_is_stopped_waits_for_nobody(silent):
    began = time.monotonic()
    Pool([silent], timeout=60).run(asks(5), lambda *_: None, stopped=lambda: time.monotonic() - began > 0.2)
    assert time.monotonic() - began < 5


def test_work_is_spread_and_bounded_per_server():
    with StubServer(delay=0.01) as one, StubServer("sglang", delay=0.01) as other:
        gather(Pool([one.url, other.url + "/v1/"], concurrency=3), asks(40))
    assert one.most <= 3 and other.most <= 3
    assert min(len(one.asked), len(other.asked)) >= 10


def test_replies_are_handed_over_in_the_calling_thread_and_an_error_there_stops_all():
    here = threading.get_ident()

    def done(index: int, reply: Reply) -> None:
        assert threading.get_ident() == here
        raise ValueError("disk full")

    with StubServer() as server, pytest.raises(ValueError, match="disk full"):
        Pool([server.url], concurrency=2).run(asks(10), done)


def test_sampling_is_spelled_out_for_every_engine():
    ask = Ask([5, 6], 4, temperature=0.7, top_p=0.9, top_k=0, seed=2**40 + 5, stop_ids=(END,))
    sent = {}
    for engine in ENGINES:
        with StubServer(engine) as server:
            gather(Pool([server.url], engine=engine), [ask])
            sent[engine] = server.bodies[0]
    assert sent["llamacpp"]["samplers"] == ["temperature", "top_k", "top_p"] and sent["llamacpp"]["cache_prompt"] is False
    assert sent["vllm"]["ignore_eos"] and sent["vllm"]["stop_token_ids"] == [END] and sent["vllm"]["top_k"] == 0
    assert sent["sglang"]["sampling_params"]["top_k"] == -1 and sent["sglang"]["sampling_params"]["no_stop_trim"]
    assert sent["llamacpp"]["seed"] == sent["vllm"]["seed"] == sent["sglang"]["sampling_params"]["sampling_seed"] == 5


def test_an_engine_that_is_another_or_unknown_is_refused():
    with StubServer("llamacpp") as server, pytest.raises(ValueError, match="this is llamacpp, not vllm"):
        gather(Pool([server.url], engine="vllm"), asks(1))
    with StubServer("something") as server, pytest.raises(ValueError, match="none of llamacpp, vllm, sglang"):
        gather(Pool([server.url]), asks(1))
    with pytest.raises(ValueError, match="engine 'tgi' is unknown"):
        Pool(["http://127.0.0.1:1"], engine="tgi")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="not a URL"):
        base_url(url)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(ValueError) as error:
        base_url("http://me:hush@example.org/v1?key=hush")
    assert "hush" not in str(error.value) and "example.org" in str(error.value)


def test_no_asks_need_no_server():
    Pool(["http://127.0.0.1:1"]).run([], lambda *_: None)
    assert base_url("http://127.0.0.1:8000/v1/") == base_url("http://127.0.0.1:8000")


def test_a_web_server_that_is_no_engine_is_said_to_be_none():
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Page(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as http:
        Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(ValueError, match=r"this is no server of llamacpp, vllm, sglang .*: check the URL") as error:
            gather(Pool([f"http://127.0.0.1:{http.server_port}"], backoff=0.01), asks(1))
        http.shutdown()
    assert "<" not in str(error.value) and "\n" not in str(error.value)
