"""The stages of one run, each finding its input in the run folder. What one stage loads, the next reuses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specgraft.config import RunConfig
from specgraft.run_dir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from specgraft.bench.load import Item
    from specgraft.export.vocabulary import DraftVocabulary
    from specgraft.records import Conversation, Features, GateResult
    from specgraft.targets.model import Target
    from specgraft.targets.text import TextTarget
    from specgraft.train.parallel.group import Group


class Session:
    """One run: its config, its folder, and the target, loaded when a stage first needs it."""

    def __init__(self, config: RunConfig, allow: frozenset[str] = frozenset()) -> None:
        from specgraft.check.gates import check_names
        from specgraft.drafters.registry import check_kind

        check_kind(config.drafters.kind)  # before the stages that need no drafter
        self.config, self.allow = config, check_names(allow)
        self.run = RunDir(Path(config.run.root).expanduser() / config.run.name)
        self.writes = True  # the files of the run; of several ranks only the first

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds of a stage to timing.json, over resumed runs too.

        config.json follows when the stage is through: one that refuses other settings leaves what describes the run.
        """
        if not self.writes:
            yield
            return
        if not self.run.create().config.exists():
            write_json(self.run.config, self.config.model_dump(mode="json"))
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = read_json(self.run.timing) if self.run.timing.exists() else {}
            seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
            write_json(self.run.timing, seconds)
        write_json(self.run.config, self.config.model_dump(mode="json"))

    @cached_property
    def target(self) -> Target:
        prepare(self.config)
        from specgraft.targets.load import load_target

        part = self.config.target
        if self.config.capture.target == "outer":
            from specgraft.targets.outer import load_outer
            from specgraft.targets.text import load_text, text_identity

            outer: Any = load_outer(part.id, part.dtype, self.config.run.device, part.remote_code)
            found = text_identity(load_text(part.id, part.remote_code))
            files = found.pop("weight_files")
            outer.given_identity = {**found, "weights": f"files {files}", "dtype": part.dtype}
            return cast("Target", outer)
        return load_target(part.id, part.dtype, self.config.run.device, part.remote_code)

    @cached_property
    def text(self) -> TextTarget | Target:
        """The text side of the target; the target itself where it is loaded already."""
        if "target" in self.__dict__:
            return self.target
        prepare(self.config)
        from specgraft.targets.text import load_text

        return load_text(self.config.target.id, self.config.target.remote_code)

    @cached_property
    def header(self) -> dict[str, Any]:
        """The manifest fields that tie features to this target and these taps."""
        from specgraft.capture.stage import feature_header

        return feature_header(self.config, self.target)

    def regen(self) -> list[Conversation]:
        from specgraft.regen.stage import regen
        from specgraft.regen.stats import data_summary

        elsewhere = self.config.regen.servers or self.config.regen.answers == "recorded"
        if not elsewhere and self.config.capture.target == "outer":
            raise ValueError('capture.target="outer": the target cannot answer in this process; name regen.servers')
        with self.timed("regen"):
            conversations = regen(self.config, self.run, self.text if elsewhere else self.target)
        write_json(self.run.data, data_summary(conversations, self.text.tokenizer))
        return conversations

    def conversations(self) -> list[Conversation]:
        """The answered conversations of this run, train first. Raises ValueError when some are missing."""
        from specgraft.records import read_conversations
        from specgraft.regen.answered import chosen_rows
        from specgraft.regen.mix import chosen_prompts

        return chosen_rows(self.config, self.run, chosen_prompts(self.config, self.run), read_conversations(self.run.regen))

    def capture(self) -> None:
        from specgraft.capture.stage import capture

        conversations = self.conversations()
        tokens = self.token_gates(conversations)
        self.passed(tokens + self.capture_gates(conversations))
        with self.timed("capture"):
            capture(self.config, self.run, self.target, conversations)
        self.passed(self.shard_gates(tokens, conversations) + self.stored_gates(conversations))

    def exportable(self) -> bool:
        """Whether the engine loads this kind of drafter for this target; says so, before any training, where it does not.

        Raises ValueError where the exporter would refuse the drafter for something else.
        """
        from specgraft.export.facts import target_facts
        from specgraft.export.refusals import no_exporter, refuse
        from specgraft.export.support import unsupported
        from specgraft.log import say
        from specgraft.train.setup import drafter_config

        part, shape = self.config.export, drafter_config(self.config, self.target, self.header["taps"])
        facts = target_facts(self.run)
        if reason := no_exporter(shape) or unsupported(part.to, shape.kind, facts.model_type):
            say(f"export will be left out: {reason}")
            return False
        refuse(shape, part.dtype, part.to, facts, part.vocabulary)
        return True

    def train(self) -> Path:
        """In this process, or as one of the ranks that torchrun or Ray Train has started."""
        prepare(self.config)
        from specgraft.train.checkpoint import latest
        from specgraft.train.parallel.group import joined
        from specgraft.train.stage import train

        with joined(self.config.run.device, self.config.train.timeout) as group:
            self.writes = group.leads
            conversations = group.alike(self.conversations)
            if self.config.stream.medium == "disk":
                header = group.alike(lambda: self.header)
                with self.timed("train"):
                    train(self.config, self.run, self.target, header, conversations, group=group)
            else:
                self.train_live(conversations, group)
            return group.alike(lambda: latest(self.run.checkpoints))

    def train_on_ray(self, workers: int) -> Path:
        """The same with that many workers of Ray Train as ranks."""
        from functools import partial

        from specgraft.train.parallel.ray_train import on_workers

        return on_workers(self.config, self.run.root, workers, partial(train_there, self.config, self.allow))

    def train_live(self, conversations: list[Conversation], group: Group) -> None:
        """Training on features that are made meanwhile; what capture checks before it writes is checked here."""
        from specgraft.capture.feed import opened
        from specgraft.train.stage import train

        if self.config.stream.medium == "ray":
            return self.train_remote(conversations, group)
        group.alike(lambda: self.passed(self.token_gates(conversations) + self.capture_gates(conversations)))
        with self.timed("train"):
            source = group.alike(lambda: opened(self.config, self.run, self.target, self.header, conversations))
            train(self.config, self.run, self.target, self.header, conversations, opened=source, group=group)

    def train_remote(self, conversations: list[Conversation], group: Group) -> None:
        """The same with the target in Ray's actors: this process has its embedding, head and final norm."""
        prepare(self.config)
        from functools import partial

        from specgraft.capture.feed import opened, produce, row_bytes
        from specgraft.capture.stage import feature_header
        from specgraft.stream.crew import Crew, new_mark
        from specgraft.stream.scoring import remote_scorer
        from specgraft.targets.load import identity
        from specgraft.targets.outer import load_outer
        from specgraft.train.stage import train

        part, config = self.config.target, self.config
        mark = group.told(new_mark(), 0) if group.size > 1 else ""
        with self.timed("train"), group.alike(lambda: Crew(config.stream, partial(hosted, config), mark, group.leads)) as crew:
            outer: Any = group.alike(lambda: load_outer(part.id, part.dtype, config.run.device, part.remote_code))
            outer.given_identity = group.alike(lambda: crew.ask(identity))
            header = group.alike(lambda: feature_header(config, outer))
            group.lead(lambda: self.passed(self.token_gates(conversations) + crew.ask(gates_there, config, self.run, conversations)))
            size, coded = row_bytes(header, outer.streams), header["dtype"] == "fp8"
            source = group.alike(
                lambda: opened(config, self.run, outer, header, conversations, lambda counts: crew.make(produce, size, counts, header["taps"], coded))
            )
            score = remote_scorer(crew, outer.dtype) if config.distill.origin == "branches" else None
            train(config, self.run, outer, header, conversations, score=score, opened=source, group=group)

    def evaluate(self, checkpoint: Path | None = None) -> dict[str, Any]:
        prepare(self.config)
        from specgraft.evaluate.stage import evaluate
        from specgraft.train.checkpoint import named

        with self.timed("evaluate"):
            prompts = [c.prompt_id for c in self.conversations() if c.split == "heldout"]
            folder = named(self.run.checkpoints, checkpoint)
            refuse_another_drafter(self.config, folder)
            result = evaluate(self.config, self.run, folder, prompts)
        self.passed(self.evaluate_gates(result))
        return result

    def export(self, checkpoint: Path | None = None, out: Path | None = None) -> Path:
        """The drafter in the form of `export.to`; and the bundle, where one is asked for. `out`: another folder than the run's."""
        from specgraft.export.stage import export
        from specgraft.targets.embedded import smollm2_gguf
        from specgraft.train.checkpoint import named

        part, embedded = self.config.export, self.config.target.id == "smollm2"
        with self.timed("export"):
            source = named(self.run.checkpoints, checkpoint)
            refuse_another_drafter(self.config, source)
            gguf = str(smollm2_gguf() or "") if embedded and not part.target_gguf else part.target_gguf
            folder = export(self.config, self.run, source, out, self.draft_vocabulary() if part.vocabulary else None, gguf)
        self.passed(self.export_gates(source, folder))
        if part.bundle:
            self.bundle(folder, gguf)
        return folder

    def bundle(self, drafter: Path, gguf: str) -> None:
        """Target and drafter in one folder beside the export."""
        from specgraft.export.bundle import bundle
        from specgraft.export.facts import target_facts

        target = Path(gguf) if self.config.export.to == "llamacpp" and gguf else target_facts(self.run).folder
        if target is None:
            raise ValueError(f"{self.config.target.id}: is no folder here; a bundle links the target's files, so fetch it and name its folder in target.id")
        bundle(drafter.with_name(f"{drafter.name}-bundle"), target, drafter, self.config.drafters.kind)

    def draft_vocabulary(self) -> DraftVocabulary:
        """The commonest ids of the training answers, and the target's head for them."""
        import torch

        from specgraft.export.vocabulary import DraftVocabulary, commonest
        from specgraft.records import read_conversations

        target = self.target
        answered = [c for c in read_conversations(self.run.regen) if c.split == "train"]
        answers = [[token for token, mine in zip(c.input_ids, c.loss_mask, strict=True) if mine] for c in answered]
        ids, share = commonest(answers, target.end_ids, self.config.export.vocabulary, target.vocab_size)
        rows = torch.tensor(ids)
        return DraftVocabulary(rows, target.head.weight.detach()[rows.to(target.device)].cpu(), share)

    def bench(self) -> dict[str, Any]:
        """A real engine with and without drafters; the gate holds its accept length against the decode loop's."""
        from specgraft.bench.launch import Launcher
        from specgraft.bench.stage import Plan, bench, prompts_digest
        from specgraft.bench.table import show
        from specgraft.engines.install import llama_server, python_of
        from specgraft.targets.text import resolve

        part, text = self.config.bench, self.text
        items = self.bench_items(text)
        models = part.models or {self.config.target.dtype: resolve(self.config.target.id)}
        drafters = part.drafters or {self.config.drafters.kind: str(self.run.export)}
        with self.timed("bench"):
            marks = {"prompts": prompts_digest(items), "drafters": drafter_digests(drafters), "machine": machine()}
            plan = Plan(part, models, drafters, items, text.end_ids, marks)
            program = part.program or str(llama_server() if part.engine == "llamacpp" else python_of(part.engine))
            launch = Launcher(part, program, self.run.bench, self.config.target.dtype)
            found = bench(plan, self.run.bench, launch)
        show(found["rows"])
        if gates := self.bench_gates(found, items, drafters):
            self.passed(gates)
        return found

    def bench_items(self, text: TextTarget | Target) -> list[Item]:
        """Prompts of the suites as token ids; without suites those of the held-out conversations."""
        from specgraft.bench.load import Item
        from specgraft.evaluate.stage import prompt_of
        from specgraft.records import read_conversations
        from specgraft.regen.render import Chat
        from specgraft.regen.suites import suite_prompts

        part = self.config.bench
        if part.suites:
            chat = Chat(text.tokenizer, text.end_ids, self.config.regen.thinking)
            return [
                Item(name, number, ids) for name, path in part.suites.items() for number, ids in suite_prompts(path, chat, part.prompts, part.prompt_tokens)
            ]
        held = [(c.prompt_id, prompt_of(c)) for c in read_conversations(self.run.regen) if c.split == "heldout"]
        items = [Item("held out", name, ids) for name, ids in held if len(ids) <= part.prompt_tokens][: part.prompts]
        if not items:
            raise ValueError(f"{self.run.regen}: no held-out prompts of at most {part.prompt_tokens} tokens; run regen, or name bench.suites")
        return items

    def bench_gates(self, found: dict[str, Any], items: list[Item], drafters: dict[str, str]) -> list[GateResult]:
        """Engine agreement of this run's own drafter, at T=0, one at a time, with all of its drafts; nothing where that was not measured."""
        from specgraft.check.engine_agreement import engine_agreement
        from specgraft.evaluate.measured_pair import pooled_accept_length
        from specgraft.train.checkpoint import latest

        own = next((name for name, path in drafters.items() if Path(path).resolve() == self.run.export.resolve()), None)
        part = self.config.bench
        rows = [r for r in found["rows"] if r["drafter"] == own and r["temperature"] == 0]
        if not rows or part.draft_tokens not in (0, self.config.drafters.draft_tokens):
            return []
        row = min(rows, key=lambda r: r["concurrency"])
        loop = pooled_accept_length(self.config, latest(self.run.checkpoints), [item.ids for item in items], part.max_new_tokens)
        return [engine_agreement(row["accept_length_pooled"], loop, self.config.check.engine_agreement)]

    def check(self, every: bool = False) -> list[GateResult]:
        """Every gate whose stage has run; the results go to gates.json. `every`: token identity of all rows, not of a sample."""
        conversations = self.conversations()
        results = self.token_gates(conversations, every)
        if self.run.features.exists():
            results = self.shard_gates(results, conversations, every) + self.stored_gates(conversations)
        else:
            results += self.capture_gates(conversations)
        if self.run.evaluation.exists():
            results += self.evaluate_gates(read_json(self.run.evaluation))
        if self.run.export.exists():
            results += self.export_gates(None)
        return results

    def report(self) -> Path:
        from specgraft.report.stage import report

        return report(self.run)

    # gates, by the stage they belong to

    def token_gates(self, conversations: list[Conversation], every: bool = False) -> list[GateResult]:
        from specgraft.check.token_identity import SAMPLE, token_identity
        from specgraft.regen.mix import chosen_prompts
        from specgraft.regen.render import Chat
        from specgraft.regen.renders import Renders

        chat = Chat(self.text.tokenizer, self.text.end_ids, self.config.regen.thinking)
        renders = Renders(chat, chosen_prompts(self.config, self.run))
        return [token_identity(conversations, renders, chat.end_ids, renders.recorded, 0 if every else SAMPLE)]

    def shard_gates(self, tokens: list[GateResult], conversations: list[Conversation], every: bool = False) -> list[GateResult]:
        """Token identity carried on to what stands in the shards."""
        from specgraft.check.token_identity import SHARD_SAMPLE, joined, shard_identity
        from specgraft.stream.stored import stored_ids

        stored = stored_ids(self.run.features, 0 if every else SHARD_SAMPLE)
        return [joined(tokens[0], shard_identity(stored, {c.prompt_id: c for c in conversations}))]

    def capture_gates(self, conversations: list[Conversation]) -> list[GateResult]:
        """Tap and distribution identity of rows captured anew, before any shard is written; rows of servers against this target."""
        from specgraft.capture.stage import producer

        make = producer(self.config, self.target, self.header)
        return self.feature_gates(self.rows(conversations), lambda c: next(make([[c]])))

    def rows(self, conversations: list[Conversation]) -> list[Conversation]:
        """The rows that capture makes of them: cut where they are too long, without those from which nothing can be learnt."""
        from specgraft.capture.cuts import shortened

        rows, _ = shortened(conversations, self.header["max_length"])
        if not rows:
            raise ValueError("no conversation has two tokens of an answer: raise capture.max_length or regen.max_new_tokens")
        return rows

    def stored_gates(self, conversations: list[Conversation]) -> list[GateResult]:
        """The same of rows read back from the shards; states in fp8 are judged as half precision is."""
        from specgraft.records import ids_digest
        from specgraft.stream.shards import ShardReader

        mine = {c.prompt_id: c for c in conversations if c.split == "train"}
        keep = {name: ids_digest(c.input_ids) for name, c in mine.items()}
        reader = ShardReader(self.run.features, "train", self.header, keep=keep)
        place = {prompt_id: number for number, (_, _, prompt_id, _) in enumerate(reader.index)}
        rows = self.rows([mine[name] for name in place])
        return self.feature_gates(rows, lambda c: reader[place[c.prompt_id]], self.header["dtype"])

    def feature_gates(
        self, conversations: list[Conversation], features: Callable[[Conversation], Features], stored: str = "target"
    ) -> list[GateResult]:
        from specgraft.check.distribution_identity import distribution_identity
        from specgraft.check.tap_identity import tap_identity
        from specgraft.drafters.shared import Shared
        from specgraft.train.setup import mask_token

        by_length = sorted(conversations, key=lambda c: len(c.input_ids))
        three = [by_length[len(by_length) * place // 8] for place in (1, 4, 7)]
        results = [tap_identity(self.target, features, three, self.header["taps"], stored)]
        if greedy := [c for c in conversations if c.temperature == 0 and c.answers == "target"][:8]:
            shared = Shared.of(self.target, mask_token(self.config, self.target))
            results.append(distribution_identity(self.target, shared, [(c, features(c)) for c in greedy], stored))
        return results

    def evaluate_gates(self, result: dict[str, Any]) -> list[GateResult]:
        from specgraft.check.agreement import agreement
        from specgraft.check.lossless import lossless

        t0 = result["t0"]
        return [
            agreement(t0["predicted_accept_length"], t0["accept_length_pooled"], self.config.check.agreement),
            lossless(result),
        ]

    def export_gates(self, checkpoint: Path | None, folder: Path | None = None) -> list[GateResult]:
        from specgraft.check.export import export
        from specgraft.drafters.store import load_drafter
        from specgraft.train.checkpoint import latest

        return [export(folder or self.run.export, load_drafter(checkpoint or latest(self.run.checkpoints)))]

    def passed(self, results: list[GateResult]) -> None:
        """Records gates and refuses to go on when one failed and is not allowed to."""
        from specgraft.check.gates import record, require

        if self.writes:
            record(self.run, results, self.allow)
        require(results, self.allow)


def train_there(config: RunConfig, allow: frozenset[str]) -> Path:
    """On a worker of Ray Train."""
    return Session(config, allow).train()


def hosted(config: RunConfig) -> Target:
    """In an actor: the target, on the actor's own device."""
    prepare(config)
    from specgraft.targets.load import load_target

    part = config.target
    return load_target(part.id, part.dtype, "cuda" if config.stream.gpus else "cpu", part.remote_code)


def gates_there(target: Target, config: RunConfig, run: RunDir, conversations: list[Conversation]) -> list[GateResult]:
    """In an actor: what capture checks of its target."""
    work = Session(config)
    work.run = run
    work.__dict__["target"] = target  # a cached property
    return work.capture_gates(conversations)


def refuse_another_drafter(config: RunConfig, checkpoint: Path) -> None:
    """Raises ValueError where the run file describes another drafter than the checkpoint holds: numbers of the one would stand
    under the settings of the other."""
    from specgraft.drafters.store import load_drafter
    from specgraft.train.setup import kind_fields

    stored, part = load_drafter(checkpoint).config, config.drafters
    for name in ("kind", "draft_tokens", "layers", "block_causal", *kind_fields(part)):
        if getattr(stored, name) != getattr(part, name):
            raise ValueError(
                f"{checkpoint}: trained with drafters.{name}={getattr(stored, name)!r}, now {getattr(part, name)!r}; set it back, or "
                "name another checkpoint"
            )


def drafter_digests(drafters: dict[str, str]) -> dict[str, str]:
    """sha256 of every drafter's weights. Raises ValueError for one that is not there."""
    from specgraft.targets.text import digest

    found = {}
    for name, place in drafters.items():
        path = Path(place)
        files = [path] if path.is_file() else [path / file for file in ("drafter.gguf", "model.safetensors") if (path / file).is_file()]
        if not files:
            raise ValueError(f"{path}: no exported drafter there; run export, or name it in bench.drafters")
        found[name] = digest(files[0])
    return found


def machine() -> str:
    """What the numbers were measured on."""
    import platform

    return f"{platform.machine()}, {os.cpu_count()} processors"


def prepare(config: RunConfig) -> None:
    """Process-wide settings, before the first tensor: threads, and no look at the hub for a local target."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if config.run.threads:
        torch.set_num_threads(config.run.threads)
