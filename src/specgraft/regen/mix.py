"""Which prompts a run answers: sources mixed by language x domain x length, cleaned, split by family. The same set on any machine.

`draw` makes the mix and says how; `chosen_prompts` is what the stages call: it keeps the drawn set in the run folder.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specgraft.config import PromptsSection, RunConfig
from specgraft.log import say
from specgraft.records import Prompt
from specgraft.regen.cleaning import Cleaned, clean
from specgraft.regen.lengths import ALL, band_of, characters
from specgraft.regen.mix_table import plan_lines, shortfalls
from specgraft.regen.prompts import builtin_prompts, read_prompts, split_of
from specgraft.regen.quotas import apportion, in_turns, share_out
from specgraft.regen.sources import Read, read_source
from specgraft.regen.stored import store, stored
from specgraft.run_dir import RunDir

__all__ = ["Mix", "chosen_prompts", "draw", "plan_lines", "refusal"]

SPLITS = (("train", "train"), ("heldout", "held_out"))  # name of the split, key of `[prompts]`
Cell = tuple[str, str, str]  # language, domain, length band


@dataclass(frozen=True)
class Mix:
    """A drawn mix."""

    prompts: dict[str, list[Prompt]]  # by split, "train" and "heldout"; mixed from the start
    report: dict[str, Any]  # JSON: what was wanted, got, available, taken out and why (docs/regen.md)


def chosen_prompts(config: RunConfig, run: RunDir | None = None) -> dict[str, list[Prompt]]:
    """The prompts of each split, "train" and "heldout".

    With `run`, the set is drawn once and kept in RUN/prompts; other settings, sources or suites draw it anew.
    Raises ValueError when the sources hold too few.
    """
    if run is None:
        return draw(config).prompts
    if (kept := stored(config, run)) is not None:
        return kept
    mix = draw(config)
    store(config, run, mix.prompts, mix.report)
    if config.prompts.sources:
        _say(mix.report, run)
    return mix.prompts


def _say(report: dict[str, Any], run: RunDir) -> None:
    """What a user must know even where nobody asked for the plan."""
    counts = {what: sum(row[what] for row in report["sources"]) for what in ("rejected", "contaminated", "near_duplicates")}
    out = ", ".join(f"{count} {what.replace('_', '-')}" for what, count in counts.items() if count)
    drawn = " and ".join(f"{held['got']} {split}" for split, held in report["splits"].items())
    say(f"prompts: {drawn}; left out: {out or 'none'} ({run.prompts / 'mix.json'})")
    if short := shortfalls(report):
        say(f"prompts: fewer than asked for: {'; '.join(short)}")


def draw(config: RunConfig, stop: bool = True) -> Mix:
    """Draws the mix anew; reads files, writes nothing, loads no torch.

    Raises ValueError in one line; with `stop` also for a quota that cannot be met (`refusal`), where the run file wants that.
    """
    if not config.prompts.sources:
        return _single(config)
    part, seed = config.prompts, config.run.seed
    shares = _shares(part)
    languages, domains = ([name for name in names if names[name] > 0] for names in (part.languages, part.domains))
    reads = [read_source(source, seed, languages, domains) for source in part.sources]
    asked: list[Prompt] = []
    cell_of: dict[str, Cell] = {}
    unasked: Counter[Cell] = Counter()
    for prompt in (prompt for read in reads for prompt in read.prompts):
        cell = (prompt.language, prompt.domain, band_of(characters(prompt), part.lengths) or "other")
        if cell in shares:
            cell_of[prompt.id] = cell
            asked.append(prompt)
        else:
            unasked[cell] += 1
    cleaned = clean(part, asked)
    pools: dict[tuple[str, Cell], dict[str, list[Prompt]]] = {}
    for prompt in cleaned.prompts:
        place = split_of(prompt.family, part.held_out_share), cell_of[prompt.id]
        pools.setdefault(place, {}).setdefault(prompt.id.split("/")[0], []).append(prompt)
    prompts, splits = {}, {}
    for split, key in SPLITS:
        wanted = apportion(getattr(part, key), shares)
        prompts[split], cells = _take(part, seed, wanted, {cell: pools.get((split, cell), {}) for cell in shares})
        splits[split] = _split_report(getattr(part, key), prompts[split], cells)
    report = {
        "seed": seed,
        "weighed": True,
        "splits": splits,
        "sources": [_source_report(source.path, read, cell_of, cleaned, prompts) for source, read in zip(part.sources, reads, strict=True)],
        "rejected": [{"source": read.name, **dataclasses.asdict(row)} for read in reads for row in read.rejected],
        "not_asked": [{"language": a, "domain": b, "length": c, "prompts": n} for (a, b, c), n in sorted(unasked.items())],
        **cleaned.report,
    }
    if stop and (fault := refusal(config, report)):
        raise ValueError(fault)
    return Mix(prompts, report)


def _shares(part: PromptsSection) -> dict[Cell, float]:
    """The share of each cell; those without weight are no cells."""
    axes = [part.languages, part.domains, part.lengths or {ALL: 1.0}]
    for what, weights in zip(("languages", "domains", "lengths"), axes, strict=True):
        if not 0 < sum(weights.values()) < 1e100:
            why = "no weight is positive; give at least one" if not sum(weights.values()) > 0 else "the weights are too large; divide them all by one number"
            raise ValueError(f"prompts.{what}: {why}")
    total = sum(axes[0].values()) * sum(axes[1].values()) * sum(axes[2].values())
    return {
        (language, domain, band): one * other * third / total
        for (language, one), (domain, other), (band, third) in product(*(axis.items() for axis in axes))
        if one > 0 and other > 0 and third > 0
    }


def _take(
    part: PromptsSection, seed: int, wanted: dict[Cell, int], pools: dict[Cell, dict[str, list[Prompt]]]
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Prompts of one split, spread evenly over the list, and its cells for the report."""
    weights = {source.label: source.weight for source in part.sources}
    placed: list[tuple[float, int, Prompt]] = []
    cells: list[dict[str, Any]] = []
    for cell, count in wanted.items():
        held = {name: len(prompts) for name, prompts in pools[cell].items()}
        given = share_out(count, weights, held)
        for name, number in given.items():
            some = in_turns(pools[cell].get(name, []), seed)[:number]
            placed += [((place + 0.5) / number, len(cells), prompt) for place, prompt in enumerate(some)]
        row = dict(zip(("language", "domain", "length"), cell, strict=True))
        cells.append(
            {
                **row,
                "wanted": count,
                "got": sum(given.values()),
                "available": sum(held.values()),
                "sources": {name: number for name, number in given.items() if number},
            }
        )
    placed.sort(key=lambda item: item[:2])
    return [prompt for _, _, prompt in placed], cells


def _split_report(wanted: int, prompts: Sequence[Prompt], cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"wanted": wanted, "got": len(prompts), "families": len({prompt.family for prompt in prompts}), "cells": cells}


def refusal(config: RunConfig, report: dict[str, Any]) -> str:
    """Why a run with this mix is refused, in one line; empty where it is not."""
    part = config.prompts
    for split, key in SPLITS:
        held = report["splits"][split]
        short = [cell for cell in held["cells"] if cell["got"] < cell["wanted"]]
        if not short or (part.shortfall == "report" and held["got"]):
            continue
        places = [
            f"{cell['language']}-{cell['domain']}{'' if cell['length'] == ALL else ' ' + cell['length']} "
            f"(wanted {cell['wanted']}, available {cell['available']})"
            for cell in short
        ]
        advice = "" if key == "train" else " raise prompts.held_out_share,"
        return (
            f"prompts.{key}={held['wanted']}: the sources cannot fill {', '.join(places)}:{advice} add sources, change the weights or "
            'the number, or take what is there with prompts.shortfall="report"'
        )
    return ""


def _source_report(path: str, read: Read, cell_of: dict[str, Cell], cleaned: Cleaned, prompts: dict[str, list[Prompt]]) -> dict[str, Any]:
    mine = {prompt.id for prompt in read.prompts}
    return {
        "name": read.name,
        "path": path,
        "rows": read.rows,
        "rejected": len(read.rejected),
        "not_asked": sum(name not in cell_of for name in mine),
        "contaminated": len(mine & cleaned.contaminated),
        "near_duplicates": len(mine & cleaned.duplicates),
        "available": sum(prompt.id in mine for prompt in cleaned.prompts),
        **{split: sum(prompt.id in mine for prompt in some) for split, some in prompts.items()},
    }


def _single(config: RunConfig) -> Mix:
    """`prompts.source`: the built-in set by the weights, or one file as it is, in its order."""
    part = config.prompts
    builtin = part.source == "builtin"
    whole = [] if builtin else read_prompts(part.source)
    prompts, splits = {}, {}
    for split, key in SPLITS:
        wanted = getattr(part, key)

        def keep(family: str, split: str = split) -> bool:
            return split_of(family, part.held_out_share) == split

        try:
            if builtin:
                mine = builtin_prompts(wanted, seed=config.run.seed, languages=part.languages, domains=part.domains, keep=keep)
            else:
                mine = [prompt for prompt in whole if keep(prompt.family)]
        except ValueError as error:
            raise ValueError(f"prompts.{key}={wanted}: {error}") from None
        if len(mine) < wanted:
            raise ValueError(
                f"prompts.{key}={wanted}, but {part.source} has {len(mine)} {split} prompts at "
                f"held_out_share={part.held_out_share}: lower the number or change the share"
            )
        prompts[split] = mine[:wanted]
        counts = Counter((prompt.language, prompt.domain) for prompt in prompts[split])
        quotas = apportion(wanted, {cell[:2]: share for cell, share in _shares(part).items()}) if builtin else dict(counts)
        cells = [
            {"language": a, "domain": b, "length": ALL, "wanted": n, "got": counts[a, b], "sources": {part.source: counts[a, b]}}
            for (a, b), n in quotas.items()
        ]
        splits[split] = _split_report(wanted, prompts[split], cells)
    report = {"seed": config.run.seed, "weighed": builtin, "splits": splits}
    return Mix(prompts, report)
