"""`bench`: one engine with and without drafters, over models, temperatures and widths; every finished cell is kept.

A cell is one model, drafter, temperature and concurrency. Contenders take turns within a cell's repeats, so that a machine's moods
fall on all of them alike. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specgraft.bench.load import Answered, Item, Served, drive
from specgraft.bench.probes import best_length, gap, pass_ms
from specgraft.bench.summary import cell_summary, compared, predicted_speedup, same_text
from specgraft.bench.words import headline
from specgraft.config import BenchSection
from specgraft.engines.counters import Counters, read_counters
from specgraft.engines.wire import Ask
from specgraft.log import Bar, progress
from specgraft.run_dir import read_json, write_json

NONE = "none"  # the contender without a drafter
Launch = Callable[[str, str, int], AbstractContextManager[Served]]  # model, drafter ("" for none), widest concurrency -> a server
TIES = 0.02  # log-probability gap under which two next tokens count as a tie


@dataclass(frozen=True)
class Plan:
    """What is measured. Filled by the caller."""

    part: BenchSection
    models: dict[str, str]
    drafters: dict[str, str]  # without NONE
    items: Sequence[Item]
    stop_ids: tuple[int, ...]
    settings: dict[str, Any]  # what the numbers depend on beside the section: digests of drafters, of the prompts

    @property
    def cells(self) -> list[tuple[float, int]]:
        return [(temperature, width) for temperature in self.part.temperatures for width in self.part.concurrency]

    def asks(self, temperature: float, repeat: int) -> Callable[[Item], Ask]:
        """The same seed for every contender: what differs is the drafter alone."""

        def ask(item: Item) -> Ask:
            seed = int.from_bytes(hashlib.sha256(f"{item.suite}/{item.id}/{repeat}".encode()).digest()[:4], "big") >> 1
            return Ask(item.ids, self.part.max_new_tokens, temperature, seed=seed, stop_ids=self.stop_ids)

        return ask


def bench(plan: Plan, folder: Path, launch: Launch) -> dict[str, Any]:
    """Measures what `folder` does not hold yet; returns and writes `folder`/bench.json.

    Raises ValueError naming the request at the first fault of a server; finished cells stay and are not measured again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"bench": plan.part.model_dump(mode="json"), **plan.settings}
    _same_settings(folder, marks)
    contenders = [NONE, *plan.drafters]
    groups = [contenders] if plan.part.alternate else [[name] for name in contenders]
    total = len(plan.models) * len(contenders) * len(plan.cells) * plan.part.repeats * len(plan.items)
    with progress("bench", total) as bar:
        for model in plan.models:
            for group in groups:
                _measure(plan, folder, launch, model, group, bar)
            if _want_probes(plan, folder, model):
                with launch(plan.models[model], "", max(plan.part.concurrency)) as plain:
                    _probe(plan, folder, model, plain)
    rows = rows_of(plan, folder)
    found = {"settings": marks, "suites": _suites(plan), "said": headline(rows), "rows": rows, "probes": _probes_of(plan, folder)}
    write_json(folder / "bench.json", found)
    return found


def _same_settings(folder: Path, marks: dict[str, Any]) -> None:
    path = folder / "settings.json"
    if not path.exists() or not any((folder / "cells").glob("*.json")):  # nothing measured, nothing to mix up
        write_json(path, marks)
        return
    before = read_json(path)
    for key, value in marks.items():
        if before.get(key) != value:
            raise ValueError(f"{folder}: holds cells measured with another `{key}`; delete that folder, or use another run.name")


def cell_path(folder: Path, model: str, drafter: str, temperature: float, width: int) -> Path:
    return folder / "cells" / f"{model}-{drafter}-t{temperature:g}-c{width}.json"


def _measure(plan: Plan, folder: Path, launch: Launch, model: str, group: Sequence[str], bar: Bar) -> None:
    """All cells of one model for the contenders that are up together."""
    missing = [cell for cell in plan.cells if not all(cell_path(folder, model, name, *cell).exists() for name in group)]
    bar.at(bar.done + (len(plan.cells) - len(missing)) * len(group) * plan.part.repeats * len(plan.items))
    if not missing:
        return
    widest = max(plan.part.concurrency)
    with ExitStack() as stack:
        served = {name: stack.enter_context(launch(plan.models[model], plan.drafters.get(name, ""), widest)) for name in group}
        for temperature, width in missing:
            for name, cell in _cell(plan, served, temperature, width, bar).items():
                write_json(cell_path(folder, model, name, temperature, width), cell)
        if NONE in group and len(group) > 1 and _want_probes(plan, folder, model):
            _probe(plan, folder, model, served[NONE])


def _cell(plan: Plan, served: dict[str, Served], temperature: float, width: int, bar: Bar) -> dict[str, dict[str, Any]]:
    """Answers, wall seconds and counters of every contender; contenders take turns, a different one first each time."""
    names, part = list(served), plan.part
    answers: dict[str, list[Answered]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm-up
        drive(served[name], plan.items[: max(2, min(width, 4))], plan.asks(temperature, -1), width, part.timeout, -1, lambda answer: None)
    before = {name: _counted(served[name], part.timeout) for name in names}
    for repeat in range(part.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:

            def done(answer: Answered, name: str = name) -> None:
                answers[name].append(answer)
                bar.at(bar.done + 1, f"{name}, T={temperature:g}, {width} at a time")

            seconds[name].append(drive(served[name], plan.items, plan.asks(temperature, repeat), width, part.timeout, repeat, done))
    found = {}
    for name in names:
        after, then = _counted(served[name], part.timeout), before[name]
        counters = after.since(then) if after and then and name != NONE else None
        found[name] = {
            "seconds": seconds[name],
            "counters": None if counters is None else vars(counters),
            "answers": [answer.to_json() for answer in answers[name]],
        }
    return found


def _counted(served: Served, timeout: float) -> Counters | None:
    try:
        page = httpx.get(f"{served.url}/metrics", timeout=timeout, trust_env=False)
    except httpx.HTTPError as error:
        raise ValueError(f"{served.url}: its metrics page does not answer ({type(error).__name__}); see to the server and run bench again") from None
    return read_counters(served.engine, page.text) if page.status_code == 200 else None


def probes_path(folder: Path, model: str) -> Path:
    return folder / "cells" / f"{model}-probes.json"


def _want_probes(plan: Plan, folder: Path, model: str) -> bool:
    """Whether a plain server has something to be asked that is not known yet: llama.cpp always, vLLM where texts part."""
    if plan.part.engine == "sglang" or not plan.drafters or probes_path(folder, model).exists():
        return False
    return plan.part.engine == "llamacpp" or any(True for _ in _parted(plan, folder, model))


def _parted(plan: Plan, folder: Path, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and place of every greedy text that is not the one without a drafter."""
    for name in plan.drafters:
        for temperature, width in plan.cells:
            if temperature == 0:
                plain, spec = (read_cell(folder, model, who, temperature, width).answers for who in (NONE, name))
                for row in same_text(spec, plain):
                    yield f"{name}/c{width}/{row['suite']}/{row['id']}", row


def _probe(plan: Plan, folder: Path, model: str, served: Served) -> None:
    """Writes pass times of the plain server (llama.cpp), and how near the tokens were where greedy texts part."""
    by_length = sorted((item.ids for item in plan.items), key=len)
    middle = by_length[len(by_length) // 2]  # steps are means over all prompts
    most = max((len(read_cell(folder, model, name, *cell).survival) for name in plan.drafters for cell in plan.cells), default=0)
    widths = list(range(1, most + 2)) if most and len(middle) > most + 2 and served.engine == "llamacpp" else []
    passes = pass_ms(served, middle, widths, 5, plan.part.timeout) if widths else {}
    prompts = {(item.suite, item.id): item.ids for item in plan.items}
    gaps = {key: gap(served, prompts[row["suite"], row["id"]] + row["before"], plan.part.timeout) for key, row in _parted(plan, folder, model)}
    write_json(probes_path(folder, model), {"pass_ms": {str(width): value for width, value in passes.items()}, "gaps": gaps})


@dataclass(frozen=True)
class Cell:
    answers: list[Answered]
    seconds: list[float]
    counters: Counters | None

    @property
    def survival(self) -> list[float]:
        return self.counters.survival if self.counters else []


def read_cell(folder: Path, model: str, drafter: str, temperature: float, width: int) -> Cell:
    data = read_json(cell_path(folder, model, drafter, temperature, width))
    counters = data["counters"] and Counters(**{**data["counters"], "by_position": tuple(data["counters"]["by_position"])})
    return Cell([Answered(**answer) for answer in data["answers"]], data["seconds"], counters or None)


def unsteady(cells: Sequence[Cell]) -> int:
    """Prompts whose greedy answers are not all the same over these cells and their repeats: an engine's own noise of batching."""
    texts: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for cell in cells:
        for answer in cell.answers:
            texts.setdefault((answer.suite, answer.id), set()).add(tuple(answer.ids))
    return sum(len(found) > 1 for found in texts.values())


def rows_of(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """One row a cell, contenders beside no drafter compared with it."""
    rows = []
    for model in plan.models:
        probes = _read_probes(folder, model)
        passes = {int(width): value for width, value in probes.get("pass_ms", {}).items()}
        for temperature, width in plan.cells:
            plain = read_cell(folder, model, NONE, temperature, width)
            base = cell_summary(plain.answers, plain.seconds, None)
            rows.append({"model": model, "drafter": NONE, "temperature": temperature, "concurrency": width, **base})
            for name in plan.drafters:
                cell = read_cell(folder, model, name, temperature, width)
                found = cell_summary(cell.answers, cell.seconds, cell.counters)
                row = {"model": model, "drafter": name, "temperature": temperature, "concurrency": width, **found, **compared(found, base)}
                row["model_check"] = predicted_speedup(cell.answers, plain.answers)
                if temperature == 0:
                    parted = same_text(cell.answers, plain.answers)
                    gaps = [probes.get("gaps", {}).get(f"{name}/c{width}/{r['suite']}/{r['id']}") for r in parted]
                    ties = sum(value is not None and value < TIES for value in gaps)
                    alone = unsteady([plain, read_cell(folder, model, NONE, 0, min(plan.part.concurrency))])
                    row["lossless"] = {"prompts": len(plan.items), "differ": len(parted), "ties": ties, "plain_differ": alone, "gaps": gaps}
                size = len(found["survival"])
                if width == 1 and size and size + 1 in passes and found["step_ms"] and base["step_ms"]:
                    row["verify_ms"] = passes[size + 1]
                    row["draft_and_fixed_ms"] = found["step_ms"] - passes[size + 1]
                    row["best"] = best_length(found["survival"], found["step_ms"], passes, base["step_ms"])
                rows.append(row)
    return rows


def _read_probes(folder: Path, model: str) -> dict[str, Any]:
    path = probes_path(folder, model)
    return read_json(path) if path.exists() else {}


def _probes_of(plan: Plan, folder: Path) -> dict[str, Any]:
    return {model: _read_probes(folder, model) for model in plan.models}


def _suites(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in plan.items:
        found[item.suite] = found.get(item.suite, 0) + 1
    return found


def prompts_digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([[item.suite, item.id, item.ids] for item in items]).encode()).hexdigest()[:16]
