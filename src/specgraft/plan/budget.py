"""What a run will cost before it is started: storage, network and time, by arithmetic on its run file and on measured unit costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from specgraft.config import RunConfig
from specgraft.plan.cluster import refuse_ranks
from specgraft.plan.storage import of_config, size_text, widths
from specgraft.plan.units import Unit, Units, option

HOUR = 3600


@dataclass(frozen=True)
class Line:
    """One number of a budget, or what it waits for."""

    key: str  # stable name, for JSON
    what: str
    value: float | None  # bytes, tokens, seconds, GPU hours; None where a unit is missing
    text: str  # for the terminal; "needs --option" where a unit is missing
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Budget:
    """A run file and its unit costs. `producers` 0: as many as the run file has."""

    def __init__(self, config: RunConfig, units: Units, hidden: int = 0, ranks: int = 1, producers: int = 0) -> None:
        """Raises ValueError where the hidden size is not known, or the rows of a step do not fit so many ranks."""
        refuse_ranks(config, ranks)
        self.config, self.units, self.ranks = config, units, ranks
        self.width = widths(config.target.id, hidden)
        part, servers = config.stream, config.capture.servers
        self.live = part.medium != "disk"
        self.written = part.medium in ("disk", "hybrid") or part.keep
        self.apart = bool(servers) or part.medium == "ray"  # producers and trainer are not one process
        self.producers = producers or (part.producers if part.medium == "ray" else len(servers) or (ranks if self.live else 1))
        self.epochs = config.train.steps * config.train.rows / config.prompts.train
        self.passes = 1.0 if not self.live else min(1.0, self.epochs) if self.written else self.epochs
        self.limit = config.capture.max_length or config.train.max_length

    def lines(self) -> Iterator[Line]:
        yield from self.data()
        yield from self.bytes()
        yield from self.time()

    def line(self, key: str, what: str, unit: str, names: list[str], formula: Any, note: str = "") -> Line:
        """`formula` of the named units' values, or what is missing of them."""
        known: list[Unit | None] = [getattr(self.units, name) for name in names]
        missing = " ".join(option(name) for name, one in zip(names, known, strict=True) if one is None)
        if missing:
            return Line(key, what, None, f"needs {missing}", note)
        value = float(formula(*(one.value for one in known if one is not None)))
        return Line(key, what, value, shown(value, unit), note)

    def trained(self, mean: float) -> float:
        """Tokens that all steps see."""
        return self.epochs * self.config.prompts.train * min(mean, self.config.train.max_length)

    def prefilled(self, mean: float) -> float:
        """Tokens that the target reads to make the features of the training rows."""
        return self.passes * self.config.prompts.train * mean

    def held_out(self, mean: float) -> float:
        """Tokens of held-out rows whose features are made: all of them by `capture`, else those of every validation, once where they are kept."""
        train, rows = self.config.train, self.config.prompts.held_out
        if not self.live:
            return rows * mean
        times = 1 if self.written else math.ceil(train.steps / train.validate_every) + (self.config.distill.origin != "references")
        return times * min(train.validate_rows, rows) * mean

    def data(self) -> Iterator[Line]:
        train, config = self.config.train, self.config
        yield Line("conversations", "conversations", config.prompts.train, f"{config.prompts.train:,}", f"and {config.prompts.held_out:,} held out")
        note = f"{train.steps:,} steps of {train.rows} conversations, {train.rows * train.anchors:,} anchors each"
        yield Line("epochs", "epochs", self.epochs, f"{self.epochs:g}", note)
        for name, what, unit in (
            ("conversation_tokens", "tokens of a conversation", "tokens"), ("answer_tokens", "of them written by the target", "tokens"),
            ("answer_tokens_per_second", "a server that answers", "tokens/s"), ("producer_tokens_per_second", "a producer", "tokens/s"),
            ("rank_tokens_per_second", "a trainer rank", "tokens/s"),
        ):  # fmt: skip
            known = getattr(self.units, name)
            yield self.line(name, what, unit, [name], lambda value: value, known.source if known else "")

    def bytes(self) -> Iterator[Line]:
        config, mean = self.config, ["conversation_tokens"]
        every = config.prompts.train + config.prompts.held_out
        token = of_config(config, self.width, 1, 1)
        yield Line(
            "bytes_per_token", "features of a token", token.bytes_per_token, f"{token.bytes_per_token:,} B",
            f"{token.taps} taps and the last layer, hidden {token.hidden}, {token.dtype}, id, mask",
        )  # fmt: skip

        def kept(value: float) -> float:
            return of_config(config, self.width, max(1, round(every * value)), every).bytes

        medium = f'stream.medium="{config.stream.medium}"'
        note = f"at most {shown(kept(self.limit), 'bytes')}, were every conversation {self.limit:,} tokens long"
        if not self.written:
            yield Line("storage", "storage", 0.0, "nothing is written", medium)
            yield self.line("storage_if_written", 'storage, were it "hybrid" or "disk"', "bytes", mean, kept, note)
        else:
            yield self.line("storage", f"storage, {medium}", "bytes", mean, kept, note)
        if self.apart:
            yield from self.network()
        else:
            yield Line("network", "network", 0.0, "none", "features are made where they are used")
        if self.written:
            first = self.live  # its first epoch is not read
            read = "bytes read from shards"
            yield self.line("read", read, "bytes", mean, lambda m: (self.trained(m) - first * self.prefilled(m)) * token.bytes_per_token)

    def network(self) -> Iterator[Line]:
        """From producers to whoever takes their features; servers send states in the target's dtype, actors as they are kept."""
        width = of_config(self.config, self.width, 1, 1, self.config.target.dtype if self.config.capture.servers else "").bytes_per_token
        note = f"{width:,} B a token, {self.held_out(1.0):,.0f} held-out rows among them"
        yield self.line("network_bytes", "network, in all", "bytes", ["conversation_tokens"], lambda m: (self.prefilled(m) + self.held_out(m)) * width, note)
        rates = ["producer_tokens_per_second", *(["rank_tokens_per_second"] if self.live else [])]
        note = "as fast as the slower of producers and trainer" if self.live else "as fast as producers are"
        yield self.line("network_bytes_per_second", "network, per second", "bytes/s", rates, lambda *own: self.flow(*own) * width, note)

    def flow(self, producer: float, rank: float = math.inf) -> float:
        """Tokens per second that go from all producers to all ranks."""
        return min(self.producers * producer, self.ranks * rank)

    def time(self) -> Iterator[Line]:
        config, mean = self.config, "conversation_tokens"
        make, learn = [mean, "producer_tokens_per_second"], [mean, "rank_tokens_per_second"]
        both, rates = [*make, learn[1]], [make[1], learn[1]]
        every, servers = config.prompts.train + config.prompts.held_out, len(config.regen.servers) or 1
        wrote = ["answer_tokens", "answer_tokens_per_second"]
        yield self.line("answer_total", "answers, tokens to write", "tokens", wrote[:1], lambda answer: every * answer)
        yield self.line("answer_seconds", "answers, time", "seconds", wrote, lambda answer, rate: every * answer / rate / servers, f"{servers} at work")
        note = f"{self.passes:g} times every conversation; held-out rows come besides"
        yield self.line("prefill_total", "target, tokens to prefill", "tokens", [mean], self.prefilled, note)
        yield self.line("prefill_seconds", "target, time", "seconds", make, self.making, f"{self.producers} at work")
        yield self.line("trained_total", "trainer, tokens", "tokens", [mean], self.trained)
        yield self.line("trained_seconds", "trainer, time without waiting", "seconds", learn, self.learning, f"{self.ranks} at work")
        note = "the slower of the two, as long as features are made" if self.live and self.apart else "one after the other"
        yield self.line("seconds", "target and trainer, time", "seconds", both, lambda *own: self.whole(*own)[0], note)
        if self.live and self.apart:
            yield self.line("producers", "producers that keep up", "count", rates, lambda one, rank: math.ceil(self.ranks * rank / one - 1e-9))
            note = "of the time in which features are made"
            yield self.line("stall_share", "trainer waits", "share", rates, lambda *own: 1 - self.flow(*own) / (self.ranks * own[1]), note)
        yield self.line("trainer_gpu_hours", "trainer, GPU hours", "GPU hours", both, lambda *own: self.ranks * self.whole(*own)[2] / HOUR)
        if self.live and not self.apart:
            return
        size = config.stream.gpus if config.stream.medium == "ray" else 1.0
        names = [*both, "producer_gpus"] if config.capture.servers else both
        held = "producer_gpu_hours"
        yield self.line(held, "target, GPU hours", "GPU hours", names, lambda m, p, r, own=size: self.producers * own * self.whole(m, p, r)[1] / HOUR)
        names = [*wrote, "producer_gpus"] if config.regen.servers else wrote
        yield self.line("answer_gpu_hours", "answers, GPU hours", "GPU hours", names, lambda answer, rate, own=1.0: every * answer / rate * own / HOUR)

    def making(self, mean: float, producer: float) -> float:
        return self.prefilled(mean) / (self.producers * producer)

    def learning(self, mean: float, rank: float) -> float:
        return self.trained(mean) / (self.ranks * rank)

    def whole(self, mean: float, producer: float, rank: float) -> tuple[float, float, float]:
        """Seconds of both, those for which producers are held, those for which ranks are. While features are made the slower one decides;
        epochs that read shards have the trainer's own speed."""
        make, learn = self.making(mean, producer), self.learning(mean, rank)
        if not self.live:
            return make + learn, make, learn
        if not self.apart:
            return make + learn, make, make + learn
        beside = self.passes / self.epochs  # share of the training in which features are made
        together = max(make, learn * beside)
        return together + learn * (1 - beside), together, together + learn * (1 - beside)


def shown(value: float, unit: str) -> str:
    """For the terminal."""
    if unit in ("bytes", "bytes/s"):
        return size_text(round(value)) + ("/s" if unit == "bytes/s" else "")
    if unit == "seconds":
        return f"{value / HOUR:,.1f} h" if value >= HOUR else f"{value:,.1f} s"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:,.1f} {unit}" if value < 100_000 else f"{value:,.0f} {unit}"
