"""Producers as Ray actors: each holds the target, any number of trainer ranks ask them.

Who dies is started anew up to `stream.retries` times, and its leases go to whoever asks next. One that stays dead stops the run in
one line: half a crew would be a slow run that nobody noticed. A producer without work is never asked whether it lives.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any

from specgraft.config import StreamSection
from specgraft.log import say
from specgraft.records import Conversation
from specgraft.stream import cluster
from specgraft.stream.leases import Lease, Leases, worked
from specgraft.stream.live import Batches, Counts, Make
from specgraft.stream.parcels import Failed, Parcel, from_wire, to_wire

OVER = "stream: the producers have been sent home"
AHEAD = 3  # leases of one producer: one it works on, two that wait there while answers travel


class Lost(Exception):
    """The producer died under this call, or its answer is gone; it may be asked of another."""


class Dead(ValueError):
    """A producer is dead for good."""


class Member:
    """One place in the crew: an actor, and those that follow when it dies."""

    def __init__(self, crew: Crew, index: int) -> None:
        self.crew, self.name = crew, f"producer-{index}"
        self.generation, self.deaths = 0, 0
        self.actor: Any = None
        self.dead: Dead | None = None
        self._turn = threading.Lock()
        self.hire()

    def hire(self) -> None:
        """Starts the actor of this generation, or finds it where another rank was first. Does not wait for it."""
        part = self.crew.part
        self.actor = self.crew.remote.options(
            name=self._named(self.generation), namespace=cluster.NAMESPACE, get_if_exists=True, max_restarts=0,
            num_cpus=part.cpus, num_gpus=part.gpus,
        ).remote(self.crew.load)  # fmt: skip
        self.waits = True

    def _named(self, generation: int) -> str:
        return f"{self.crew.mark}-{self.name}-{generation}"

    def _next(self) -> int:
        """The generation behind this one; that of the living, where other ranks have seen more deaths than this one."""
        names = {found["name"] for found in self.crew.ray.util.list_named_actors(all_namespaces=True)}
        return max((n for n in range(self.generation + 1, self.generation + self.crew.part.retries + 2) if self._named(n) in names), default=self.generation + 1)

    def current(self) -> tuple[Any, int]:
        """The actor, when it has loaded, and its generation. Raises Lost, or Dead."""
        with self._turn:
            if self.dead:
                raise self.dead
            if self.crew.over:
                raise Dead(OVER)
            if self.waits:
                part = self.crew.part
                try:
                    self.pid = self.crew.ray.get(self.actor.ready.remote(), timeout=part.start_timeout)
                except self.crew.ray.exceptions.GetTimeoutError:
                    have = self.crew.ray.cluster_resources()
                    raise self._died(f"was not ready within {part.start_timeout:g} s (the cluster has {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs)", True) from None
                except self.crew.ray.exceptions.RayError as error:
                    raise self._died(cluster.one_line(error), "creation task" in str(error)) from None
                self.waits = False
            return self.actor, self.generation

    def call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """What `function(held, *arguments)` gives there, and its seconds. Raises Lost, Dead, or what the function raised."""
        actor, generation = self.current()
        errors, limit, hangs = self.crew.ray.exceptions, self.crew.part.timeout, False
        try:
            found: tuple[Any, float] = self.crew.ray.get(actor.ask.remote(function, *arguments), timeout=limit)
            return found
        except errors.GetTimeoutError:
            reason, hangs = f"gave no answer for {limit:g} s", True
        except errors.RayActorError as error:
            reason = cluster.one_line(error)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:  # the answer is lost with the node that kept it
            raise (Dead(OVER) if self.crew.over else Lost(cluster.one_line(error))) from None
        with self._turn:
            if self.dead:
                raise self.dead
            if self.crew.over:  # no death: nobody follows
                raise Dead(OVER)
            if generation == self.generation:
                told = self._died(reason, False)
                if hangs:  # not before it is counted: other threads wait for its answers too
                    self.crew.ray.kill(actor)
                raise told
        raise Lost(reason)

    def _died(self, reason: str, final: bool) -> Exception:
        """Counts a death and hires anew, or not; what to raise. The turn is held."""
        self.deaths += 1
        retries = self.crew.part.retries
        if not self.crew.alive():
            self.dead = Dead(f"stream: the Ray node of this process is gone ({self.name}: {reason}); start the run again, it goes on from its last checkpoint")
        elif final or self.deaths > retries:
            times = "" if final else f" {self.deaths} times, stream.retries={retries}"
            self.dead = Dead(f"stream: {self.name} died{times}: {reason}")
        if self.dead:
            return self.dead
        say(f"stream: {self.name} died ({reason}); started again, {self.deaths} of {retries}")
        self.generation = self._next()
        self.hire()
        return Lost(reason)


class Crew:
    """All producers of a run: `with Crew(part, load) as crew`. `load` gives what each holds and travels to where it runs.

    Ranks that share them give the same `mark`, which no other crew of the cluster has; one of them `leads`, and ends the actors.
    An actor ends with the rank that started it too, so that a killed attempt leaves none.
    """

    def __init__(self, part: StreamSection, load: Callable[[], Any], mark: str = "", leads: bool = True) -> None:
        """Raises ValueError where there is no Ray, or no cluster."""
        self.part, self.load, self.leads, self.over = part, load, leads, False
        self.owns = cluster.connect(part)
        self.ray = cluster.ray()
        self.remote = self.ray.remote(cluster.Host)
        self.mark = mark or new_mark()
        self.node = self.ray.get_runtime_context().get_node_id()
        say(f"stream: {part.producers} {'producer loads' if part.producers == 1 else 'producers load'} the target ({part.address or 'this machine'})")
        self.members = [Member(self, index) for index in range(part.producers)]
        self._turns = count()

    def alive(self) -> bool:
        """Whether the node that this process talks to is there."""
        return any(node["Alive"] and node["NodeID"] == self.node for node in self.ray.nodes())

    def make(self, function: Callable[..., list[Parcel | Failed]], size: Callable[[Conversation], int], counts: Counts, *arguments: Any) -> Make:
        """Who makes rows by `function(held, rows, *arguments)` in the actors; `size`: bytes of a row."""
        part = self.part
        counts.lanes = len(self.members)

        def work(member: Member, lease: Lease) -> Any:
            found, seconds = member.call(wired, function, list(lease.rows), *arguments)
            counts.busy += seconds
            return found

        def make(batches: Batches) -> Generator[Parcel | Failed]:
            leases = Leases(batches, part.bound_mb * 1e6, size, part.retries + 1, counts)
            for member in self.members:
                for _ in range(AHEAD):
                    threading.Thread(
                        target=worked, args=(leases, lambda lease, member=member: work(member, lease), Dead, Lost), daemon=True
                    ).start()
            try:
                while (found := leases.take()) is not None:
                    lease, sent = found
                    if len(sent) != len(lease.rows):
                        raise ValueError(f"stream: {len(sent)} rows came for {len(lease.rows)}")
                    yield from map(from_wire, sent)
            finally:
                leases.close()

        return make

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(held, *arguments)` by whoever's turn it is; another one where that one dies. Raises Dead, or what it raised."""
        while True:
            try:
                return self.members[next(self._turns) % len(self.members)].call(function, *arguments)[0]
            except Lost:
                continue

    def close(self) -> None:
        """Ends the actors, and the cluster where it was started here. Who still waits for an answer is told Dead."""
        self.over = True
        if self.owns:
            self.ray.shutdown()
        elif self.leads:
            for member in self.members:
                self.ray.kill(member.actor)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def new_mark() -> str:
    """What no other crew is called."""
    return uuid.uuid4().hex[:12]


def wired(held: Any, function: Callable[..., list[Parcel | Failed]], rows: Sequence[Conversation], *arguments: Any) -> list[Any]:
    """In the actor: rows made, as they travel."""
    return [to_wire(found) for found in function(held, rows, *arguments)]
