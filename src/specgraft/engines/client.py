"""Asks servers of a target by token ids: several at a time, again or elsewhere where one fails. HTTP only, no torch.

What is said to a server and made of its answer is a `Talk`: an answer as ids (`answer`), or hidden states (`states`).

Nothing is sent anywhere but to the URLs given: no redirects, no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import httpx

from specgraft.engines import llamacpp, sglang, vllm
from specgraft.engines.wire import END, Ask, Failed, Reply, Unusable
from specgraft.log import say

__all__ = ["Ask", "Pool", "Reply"]

ENGINES: dict[str, Any] = {"llamacpp": llamacpp, "vllm": vllm, "sglang": sglang}
LATER = {408, 425, 429, 502, 503, 504}  # the server is busy, starting or behind something that is
CONNECT = 10.0  # seconds
LONGEST = 30.0  # seconds between two tries
HELD = 0.05  # seconds until one who is too far ahead looks again
LOOK = 1.0  # until anyone does
Send = Callable[[str, str, dict[str, Any] | None], Awaitable[dict[str, Any]]]  # method, path, body -> the JSON object that came


@dataclass
class Server:
    url: str
    engine: str  # "auto" until it was asked
    model: str = ""
    met: bool = False
    failures: int = 0  # in a row
    ready: float = 0.0  # time.monotonic() of the next try
    running: int = 0


@dataclass
class Job:
    index: int
    ask: Ask
    tries: int = 0
    ready: float = 0.0
    failed_at: set[str] = field(default_factory=set)

    @property
    def said(self) -> str:
        """Its name, in front of what is said about it."""
        return f"{self.ask.name}: " if self.ask.name else ""


async def answer(send: Send, server: Server, ask: Ask) -> Reply:
    """The target's answer to a prompt, up to one of its own end tokens or the limit."""
    engine, ids = ENGINES[server.engine], list[int]()
    while True:
        path, body = engine.request(ask, server.model)
        reply: Reply = engine.reply(ask, await send("POST", path, body))
        ids += reply.ids
        if reply.finish_reason in END:
            return Reply(ids, reply.finish_reason)
        # the engine stopped at an end token of its own, which is none of the target's: on from there
        seed = None if ask.seed is None else ask.seed + len(reply.ids)
        ask = replace(ask, ids=ask.ids + reply.ids, max_new_tokens=ask.max_new_tokens - len(reply.ids), seed=seed)


Talk = Callable[[Send, Server, Ask], Awaitable[Any]]  # raises Failed where another try may help, Unusable where it would not


class Pool:
    """Servers of one target, as one. `concurrency` requests at most are under way at each.

    A request that failed `retries` + 1 times, or as many failures in a row of every server, stop the run. `backoff`
    seconds lie between the first two tries, then twice as many: 1 + 2 + 4 for 3 retries, time for a restart.
    `section` of the run file holds the keys that messages name. `silence`: a server that works on requests and twice does not say
    within so many seconds that it is there has failed, whatever its `timeout`; 0: it is not asked.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engine: str = "auto",
        concurrency: int = 16,
        timeout: float = 300,
        retries: int = 3,
        backoff: float = 1.0,
        talk: Talk = answer,
        section: str = "regen",
        silence: float = 0.0,
    ) -> None:
        if engine != "auto" and engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is unknown: use auto, {', '.join(ENGINES)}")
        if not urls:
            raise ValueError("no server is given: name at least one URL, such as http://127.0.0.1:8000")
        self.urls = list(dict.fromkeys(base_url(url) for url in urls))
        self.engine, self.concurrency, self.timeout = engine, concurrency, timeout
        self.retries, self.backoff, self.talk, self.section, self.silence = retries, backoff, talk, section, silence

    def run(
        self, asks: Iterable[Ask], done: Callable[[int, Any], None], room: Callable[[int], bool] = lambda index: True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Calls `done(index, reply)` in this thread, once for each ask, as they finish, in any order.

        No ask is given out before `room(index)` says so, and it is asked again and again. Within a second of `stopped()` all that is
        under way is given up. Raises ValueError in one line (server, request, last error, what to do), after all that was finished
        has been handed over.
        """
        asyncio.run(Round(self, asks, done, room, stopped).run())

    def wait(self, attempt: int) -> float:
        """Seconds behind the failed try number `attempt` (from 1)."""
        return float(min(self.backoff * 2 ** (attempt - 1), LONGEST))


class Round:
    """One run of a pool: one loop gives out the asks, hears the replies and decides what is tried again."""

    def __init__(
        self, pool: Pool, asks: Iterable[Ask], done: Callable[[int, Any], None], room: Callable[[int], bool], stopped: Callable[[], bool]
    ) -> None:
        self.pool, self.done, self.room, self.stopped = pool, done, room, stopped
        self.servers = [Server(url, pool.engine) for url in pool.urls]
        self.asks = enumerate(asks)
        self.fresh: Job | None = None  # the next one that nobody was asked yet
        self.held = False  # there is no room for it
        self.again: list[Job] = []
        self.running: dict[asyncio.Task[Any], tuple[Server, Job]] = {}
        self.broken: str | None = None  # why nothing more is given out

    def advance(self) -> None:
        row = next(self.asks, None)
        self.fresh = None if row is None else Job(*row)

    async def run(self) -> None:
        self.advance()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.pool.concurrency * len(self.servers))
        timeout = httpx.Timeout(self.pool.timeout, connect=min(CONNECT, self.pool.timeout))
        async with httpx.AsyncClient(verify=certificates(), limits=limits, timeout=timeout, trust_env=False, follow_redirects=False) as client:
            watches = [asyncio.create_task(self.watch(client, server)) for server in self.servers if self.pool.silence]
            try:
                while not self.stopped() and (self.running or (not self.broken and (self.fresh or self.again))):
                    if not self.broken:
                        self.give_out(client)
                    await self.hear()
            finally:
                tasks = [*watches, *self.running]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self.broken:
            raise ValueError(self.broken)

    def give_out(self, client: httpx.AsyncClient) -> None:
        gave, self.held = True, False
        while gave:  # one to each server in turn, so that few asks are spread
            gave = False
            for server in self.servers:
                if (job := self.pick(server)) is not None:
                    server.running += 1
                    self.running[asyncio.create_task(self.ask(client, server, job))] = (server, job)
                    gave = True

    def pick(self, server: Server) -> Job | None:
        """The next job for a server; one that failed there waits for another server while there is one."""
        now = time.monotonic()
        # one request shows whether a server is there (again); the others follow
        if now < server.ready or server.running >= (self.pool.concurrency if server.met and not server.failures else 1):
            return None
        healthy = {other.url for other in self.servers if not other.failures}
        for place, job in enumerate(self.again):
            if job.ready <= now and (server.url not in job.failed_at or not healthy - job.failed_at):
                return self.again.pop(place)
        fresh = self.fresh
        if fresh is None:
            return None
        if self.held or not self.room(fresh.index):
            self.held = True
            return None
        self.advance()
        return fresh

    async def hear(self) -> None:
        """Waits until a request ends or something may be tried again, and settles what ended."""
        now = time.monotonic()
        times = [job.ready for job in self.again] + [server.ready for server in self.servers if server.failures]
        soonest = min(moment for moment in [*times, now + (HELD if self.held else LOOK)] if moment > now)
        if not self.running:
            await asyncio.sleep(soonest - now)
            return
        finished, _ = await asyncio.wait(self.running, timeout=soonest - now, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            server, job = self.running.pop(task)
            server.running -= 1
            try:
                if task.cancelled():
                    raise Failed(f"it does not say that it is there, asked twice for {self.pool.silence:g} s", server=True)
                reply = task.result()
            except Failed as error:
                self.failed(server, job, error)
            except Unusable as error:
                self.broken = self.broken or f"{server.url}: {job.said}{error}"
            else:
                if server.failures:
                    say(f"{server.url}: answers again")
                server.failures, server.ready = 0, 0.0
                self.done(job.index, reply)

    async def watch(self, client: httpx.AsyncClient, server: Server) -> None:
        """Gives up what is under way at a server that is silent: requests may take long, the word that it is there may not."""
        missed = 0
        while True:
            await asyncio.sleep(self.pool.silence if not missed else 0)
            try:
                if server.running:
                    await client.get(f"{server.url}/v1/models", timeout=self.pool.silence)
                missed = 0
            except httpx.TransportError:
                missed += 1
            if missed == 2:
                missed = 0
                for task, (whose, _) in self.running.items():
                    if whose is server:
                        task.cancel()

    def failed(self, server: Server, job: Job, error: Failed) -> None:
        now = time.monotonic()
        job.tries += 1
        job.failed_at.add(server.url)
        if error.server and now >= server.ready:  # all that broke off together is one failure of the server
            server.failures += 1
            pause = self.pool.wait(server.failures)
            server.ready = now + pause
            if server.failures <= self.pool.retries:
                say(f"{server.url}: {error}; asked again in {pause:g} s")
            elif server.failures == self.pool.retries + 1 and len(self.servers) > 1:
                say(f"{server.url}: {error}; asked now and then while others answer")
        elsewhere = any(other is not server and not other.failures and other.url not in job.failed_at for other in self.servers)
        job.ready = now if elsewhere else now + self.pool.wait(job.tries)
        gone = min(other.failures for other in self.servers)  # no server is there: no need to try every job as often
        if max(job.tries, gone) <= self.pool.retries:
            self.again.append(job)
        elif not self.broken:
            tries = max(job.tries, gone)
            self.broken = f"{server.url}: {job.said}{error} ({tries} tries); see to the server and start again: what was answered is kept"

    async def ask(self, client: httpx.AsyncClient, server: Server, job: Job) -> Any:
        if not server.met:
            await self.meet(client, server)
        return await self.pool.talk(partial(self.send, client, server), server, job.ask)

    async def meet(self, client: httpx.AsyncClient, server: Server) -> None:
        """Asks a server what it is and what it calls its model; all three engines answer at /v1/models."""
        try:
            answer = await self.send(client, server, "GET", "/v1/models", None)
        except Unusable:
            raise Unusable(f"this is no server of {', '.join(ENGINES)} (it knows no /v1/models): check the URL") from None
        rows = answer.get("data")
        row = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
        engine = str(row.get("owned_by", ""))
        if server.engine == "auto":
            if engine not in ENGINES:
                raise Unusable(f"this is none of {', '.join(ENGINES)} (owner of its model: {engine[:40]!r}): set {self.pool.section}.engine")
            server.engine = engine
        elif engine in ENGINES and engine != server.engine:
            raise Unusable(f"this is {engine}, not {server.engine}: set {self.pool.section}.engine=\"{engine}\" or \"auto\"")
        server.model, server.met = str(row.get("id", "")), True

    async def send(self, client: httpx.AsyncClient, server: Server, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One exchange. Raises Failed where another try may help, Unusable where it would not."""
        try:
            async with asyncio.timeout(self.pool.timeout):
                response = await client.request(method, server.url + path, json=body)
        except (httpx.TimeoutException, TimeoutError):
            raise Failed(f"no answer within {self.pool.timeout:g} s", server=True) from None
        except httpx.TransportError as error:
            raise Failed(f"no connection ({type(error).__name__})", server=True) from None
        if response.status_code in LATER:
            raise Failed(f"HTTP {response.status_code} {said(response)}", server=True)
        if response.status_code >= 500:
            raise Failed(f"HTTP {response.status_code} {said(response)}", server=False)
        if response.status_code != 200:
            raise Unusable(f"the server refuses the request: HTTP {response.status_code} {said(response)}")
        try:
            answer = response.json()
        except ValueError:
            raise Failed("the answer is no JSON", server=False) from None
        if not isinstance(answer, dict):
            raise Failed("the answer is no JSON object", server=False)
        return answer


@cache
def certificates() -> ssl.SSLContext:
    """Read once: that takes longer than a short request."""
    return httpx.create_ssl_context(trust_env=False)


def said(response: httpx.Response) -> str:
    """What a server says about an error, in one short line."""
    try:
        answer = response.json()
        answer = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = answer.get("message", "") if isinstance(answer, dict) else answer
    except ValueError:
        text = response.text
    text = " ".join(str(text).split())
    return "" if text.startswith("<") else text[:200]  # a page for people says nothing here


def base_url(url: str) -> str:
    """`url` without a path. Raises ValueError for what is no URL of a server, and for one with a password in it."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"server {url!r}: not a URL such as http://127.0.0.1:8000")
    if parsed.userinfo or parsed.query:
        raise ValueError(f"server {parsed.host}: a name, password or query in the URL is not used; leave it out")
    path = parsed.path.rstrip("/").removesuffix("/v1")
    return str(parsed.copy_with(path=path or "/", fragment=None)).rstrip("/")
