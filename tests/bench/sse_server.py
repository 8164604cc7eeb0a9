"""A server that streams scripted answers in the way of the three engines, and fails when told to."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Script:
    """Answers are the prompt's last id + 1, + 2, ..; `per_step` ids a piece. Faults count requests from 1."""

    def __init__(self, engine: str, tokens: int = 6, per_step: int = 2) -> None:
        self.engine, self.tokens, self.per_step = engine, tokens, per_step
        self.fail_at: dict[int, str] = {}  # "die", "hang", "error", "no ids", "odd id", "early"
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.steps = self.drafted = self.accepted = 0
        self.pages = True

    def pieces(self, body: dict[str, Any]) -> list[list[int]]:
        prompt = body.get("input_ids") or body["prompt"]
        limit = body.get("n_predict") or body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        ids = [prompt[-1] + 1 + n for n in range(min(self.tokens, limit))]
        return [ids[:1]] + [ids[at : at + self.per_step] for at in range(1, len(ids), self.per_step)]


class SseServer:
    def __init__(self, script: Script) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                name = {"llamacpp": "llamacpp", "vllm": "vllm"}.get(script.engine, "sglang")
                page = [f"{name}:spec_decode_num_drafts_total {script.steps}", f"{name}:spec_decode_num_draft_tokens_total {script.drafted}"]
                page.append(f"{name}:spec_decode_num_accepted_tokens_total {script.accepted}")
                page += [f'{name}:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {script.accepted}']
                self.send_response(200)
                self.end_headers()
                self.wfile.write("\n".join(page if script.pages else []).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with script.lock:
                    script.asked.append(body)
                    fault = script.fail_at.get(len(script.asked), "")
                if fault == "error":
                    self.send_response(500)
                    self.end_headers()
                    self.wfile.write(b'{"error": {"message": "out of memory"}}')
                    return
                if not body.get("stream"):  # how near two next tokens are
                    near = {"token_id:1": -0.700, "token_id:2": -0.705}
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(json.dumps({"choices": [{"logprobs": {"top_logprobs": [near]}}]}).encode())
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                pieces = script.pieces(body)
                for number, ids in enumerate(pieces):
                    if fault == "die" and number == 1:
                        self.connection.close()
                        return
                    if fault == "hang" and number == 1:
                        time.sleep(1)
                        return
                    if fault == "early" and number == 1:
                        return
                    ids = [-1] if fault == "odd id" else ids
                    self.send(script, [i for part in pieces[: number + 1] for i in part], None if fault == "no ids" else ids, False, body)
                accepted, steps = sum(len(p) - 1 for p in pieces[1:]), len(pieces) - 1
                with script.lock:
                    script.steps, script.accepted, script.drafted = script.steps + steps, script.accepted + accepted, script.drafted + 7 * steps
                self.send(script, [i for part in pieces for i in part], [], True, body, accepted, steps)

            def send(self, script: Script, whole: list[int], ids: Any, last: bool, body: Any, accepted: int = 0, steps: int = 0) -> None:
                count = len(body.get("input_ids") or body["prompt"])
                if script.engine == "llamacpp":
                    event: dict[str, Any] = {"content": "x", "tokens": ids, "stop": last}
                    if last:
                        event |= {"stop_type": "limit", "tokens_evaluated": count, "timings": {"draft_n": 7 * steps, "draft_n_accepted": accepted}}
                elif script.engine == "vllm":
                    event = {"choices": [{"text": "x" if not last else "", "token_ids": ids, "finish_reason": "length" if last else None}]}
                    if last:
                        done = {"num_spec_steps": steps, "num_draft_tokens": 7 * steps, "num_accepted_draft_tokens": accepted}
                        event |= {"usage": {"prompt_tokens": count}, "metrics": {"speculative_decoding": done} if script.pages else None}
                else:
                    event = {"output_ids": whole if ids is not None else None, "meta_info": {"prompt_tokens": count}}
                    if last:
                        event["meta_info"] |= {"finish_reason": {"type": "length"}, "spec_verify_ct": steps, "spec_num_correct_drafts": accepted}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                if last:
                    self.wfile.write(b"data: [DONE]\n\n")
                self.wfile.flush()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> SseServer:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
