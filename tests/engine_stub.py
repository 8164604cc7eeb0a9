"""A server on this machine that speaks as llama.cpp, vLLM and SGLang do, and fails as it is told to. Standard library only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 2
Answer = Callable[[list[int]], Sequence[int]]


def counting(ids: list[int]) -> list[int]:
    """Some ids that depend on the prompt alone, then the end token."""
    return [10 + (sum(ids) + step) % 50 for step in range(1 + sum(ids) % 5)] + [END]


class StubServer:
    """`with StubServer() as server: Pool([server.url])`.

    engine         "vllm", "llamacpp" or "sglang": what it says it is
    answer         prompt ids -> ids it generates, its end token included; cut at the request's limit
    stop_ids       ids at which it stops
    kill_after     closes its port while it answers this request (1: the first); `restart()` opens it again
    delay          seconds before an answer, or a function of the prompt's ids
    errors         {number of the request: HTTP status}, or status for all when an int
    ids            False: answers without token ids
    keep_end       False: the end token is left out, as an engine may do that trims it
    finish_reason  sent in place of the true one
    states         a function of the prompt's ids: what the answer holds besides, such as where hidden states are
    info           what SGLang says of its settings
    asked          prompts in the order in which they came; `bodies` the whole requests; `most` answered at one time
    """

    def __init__(
        self,
        engine: str = "vllm",
        answer: Answer = counting,
        *,
        stop_ids: Sequence[int] = (END,),
        kill_after: int = 0,
        delay: float | Callable[[list[int]], float] = 0.0,
        errors: dict[int, int] | int | None = None,
        ids: bool = True,
        keep_end: bool = True,
        finish_reason: str = "",
        states: Callable[[list[int]], dict[str, Any]] | None = None,
        info: dict[str, Any] | None = None,
        port: int = 0,
    ) -> None:
        self.engine, self.answer, self.stop_ids = engine, answer, set(stop_ids)
        self.kill_after, self.delay, self.errors = kill_after, delay, errors or {}
        self.ids, self.keep_end, self.finish_reason, self.port = ids, keep_end, finish_reason, port
        self.states, self.info = states, info
        self.asked: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.most = self.now = 0
        self.lock = threading.Lock()
        self.http: ThreadingHTTPServer | None = None

    def __enter__(self) -> StubServer:
        self.restart()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self) -> None:
        """Opens the port (again, and the same one)."""
        self.kill()
        self.http = _Http(("127.0.0.1", self.port), _handler(self))
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """Closes the port; whoever waits for an answer sees the connection break off."""
        http, self.http = self.http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    def body_of(self, asked: dict[str, Any], prompt: list[int], limit: int) -> dict[str, Any]:
        """What the engine sends for one request."""
        if self.states is not None:
            more = self.states(prompt)
            choice = {"index": 0, "text": "t", "finish_reason": "length", "token_ids": [7], "prompt_token_ids": prompt}
            return {"choices": [choice], **more} if self.engine == "vllm" else {"output_ids": [7], "prompt_token_ids": prompt, **more}
        wanted, out, stopped = list(self.answer(prompt)), [], None
        stops = self.stop_ids | set(asked.get("stop_token_ids") or asked.get("sampling_params", {}).get("stop_token_ids") or ())
        for token in wanted[:limit]:
            out.append(token)
            if token in stops:
                stopped = token
                break
        shown = out if stopped is None or self.keep_end else out[:-1]
        reason = self.finish_reason or ("length" if stopped is None else "stop")
        if self.engine == "llamacpp":
            kind = {"stop": "eos", "length": "limit"}.get(reason, reason)
            return {"content": "text", "tokens": shown if self.ids else [], "stop": True, "stop_type": kind, "truncated": False}
        if self.engine == "sglang":
            finish = {"type": reason, **({"matched": stopped} if stopped is not None else {"length": limit})}
            return {"text": "text", **({"output_ids": shown} if self.ids else {}), "meta_info": {"finish_reason": finish}}
        ids = {"token_ids": shown, "prompt_token_ids": prompt} if self.ids else {"token_ids": None}
        return {"choices": [{"index": 0, "text": "text", "finish_reason": reason, "stop_reason": stopped, **ids}]}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none of the test's business."""


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.send(200, {"object": "list", "data": [{"id": "target", "owned_by": stub.engine}]})
            elif self.path == "/server_info" and stub.info is not None:
                self.send(200, stub.info)
            elif self.path == "/health":
                self.send(200, {"status": "ok"})
            else:
                self.send(404, {"error": {"message": "not found"}})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sampling = asked.get("sampling_params", asked)
            prompt = asked.get("prompt") or asked.get("input_ids")
            limit = sampling.get("max_tokens") or sampling.get("n_predict") or sampling.get("max_new_tokens")
            with stub.lock:
                stub.asked.append(prompt)
                stub.bodies.append(asked)
                number = len(stub.asked)
                stub.now += 1
                stub.most = max(stub.most, stub.now)
            try:
                time.sleep(stub.delay(prompt) if callable(stub.delay) else stub.delay)
                if stub.kill_after and number >= stub.kill_after:
                    stub.kill_after = 0
                    stub.kill()
                if stub.http is None:  # killed while this one was under way: no answer
                    self.close_connection = True
                    return
                status = stub.errors if isinstance(stub.errors, int) else stub.errors.get(number, 200)
                if status != 200:
                    self.send(status, {"error": {"message": f"scripted error {status}"}})
                else:
                    self.send(200, stub.body_of(asked, prompt, limit))
            finally:
                with stub.lock:
                    stub.now -= 1

    return Handler
