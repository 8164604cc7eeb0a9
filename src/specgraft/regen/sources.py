"""Sources of the mix: the built-in set, JSONL, Parquet, Hugging Face datasets. A bad row is listed with its reason, never dropped unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from specgraft.config import SourceSection
from specgraft.records import Prompt
from specgraft.regen.builtin.registry import DOMAINS, LANGUAGES
from specgraft.regen.prompts import cell_order
from specgraft.regen.schema import parse_line, parse_record


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used."""

    line: int  # of the file; of a table or data set: the row, from 1
    reason: str  # what is wrong, and what to do


@dataclass(frozen=True)
class Read:
    """What one source gave."""

    name: str
    prompts: list[Prompt]  # ids are `name/id`; the family is the record's own name, or the id where it names none
    rejected: list[Rejected]
    rows: int  # read; prompts and rejected together


def read_source(part: SourceSection, seed: int = 0, languages: Iterable[str] = LANGUAGES, domains: Iterable[str] = DOMAINS) -> Read:
    """All prompts of a source, and the rows that are none. Of the built-in set only `languages` and `domains`.

    Raises ValueError in one line where the source cannot be read, a package is missing, or no row can be used.
    """
    if part.path == "builtin":
        return _builtin(part, seed, languages, domains)
    prompts: list[Prompt] = []
    rejected: list[Rejected] = []
    lines: dict[str, int] = {}
    number = 0
    for line, row in _rows(part):
        number += 1
        try:
            options: dict[str, Any] = {"roles": part.roles, "language": part.language, "domain": part.domain}
            prompt = parse_line(row, **options) if isinstance(row, bytes) else parse_record(row, **options)
            if prompt.id in lines:
                raise ValueError(f"id {prompt.id!r} is already on line {lines[prompt.id]}; give every prompt its own id, or remove the copy")
        except ValueError as error:
            rejected.append(Rejected(line, str(error)))
            continue
        lines[prompt.id] = line
        name = f"{part.label}/{prompt.id}"
        family = name if prompt.family == prompt.id else prompt.family  # a family that is named is one over all sources
        prompts.append(dataclasses.replace(prompt, id=name, family=family))
    if not prompts:
        first = f"; the first, line {rejected[0].line}: {rejected[0].reason}" if rejected else ""
        raise ValueError(f"{part.path}: none of {number} rows can be used{first}")
    return Read(part.label, prompts, rejected, number)


def _builtin(part: SourceSection, seed: int, languages: Iterable[str], domains: Iterable[str]) -> Read:
    known = [name for name in languages if name in LANGUAGES], [name for name in domains if name in DOMAINS]
    if not all(known):
        raise ValueError(f"prompts.sources: builtin holds {', '.join(LANGUAGES)} and {', '.join(DOMAINS)}, none of which the mix asks for: remove it")
    cells = [cell_order(language, domain, seed) for language in known[0] for domain in known[1]]
    prompts = [cell[place] for place in range(max(map(len, cells))) for cell in cells if place < len(cell)][: part.limit or None]
    return Read(part.label, [dataclasses.replace(p, id=f"{part.label}/{p.id}") for p in prompts], [], len(prompts))


def _rows(part: SourceSection) -> Iterator[tuple[int, Any]]:
    """Line or row number and what stands there: bytes of a JSON line, or a record. The first `limit` of them."""
    reader = _dataset if part.path.startswith("hf:") else _parquet if part.path.endswith(".parquet") else _lines
    for count, item in enumerate(reader(part.path)):
        if part.limit and count == part.limit:
            return
        yield item


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as handle:
            yield from ((number, line) for number, line in enumerate(handle, 1) if line.strip())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the path of a JSONL or Parquet file, `builtin` or hf:owner/name") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL or Parquet file") from None


def _parquet(path: str) -> Iterator[tuple[int, Any]]:
    parquet: Any = _package("pyarrow.parquet", "pyarrow", path)
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; give the path of a Parquet file")
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, _without_null(row)
    except (OSError, ValueError) as error:  # what the package raises for a damaged file is one of these
        raise ValueError(f"{path}: cannot be read as Parquet ({_one_line(error)})") from None


def _dataset(path: str) -> Iterator[tuple[int, Any]]:
    datasets: Any = _package("datasets", "datasets", path)
    if int(str(datasets.__version__).split(".")[0]) < 3:
        raise ValueError(f"{path}: datasets {datasets.__version__} may run code of the hub; install datasets 3 or newer")
    name, _, split = path.removeprefix("hf:").partition(":")
    try:
        for number, row in enumerate(datasets.load_dataset(name, split=split or "train"), 1):
            yield number, _without_null(row)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be loaded ({_one_line(error)}); check the name, the split and the connection") from None


def _package(module: str, package: str, path: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ValueError(f"{path}: needs the package {package}, which is not installed: pip install {package}, or write the rows as JSONL") from None


def _without_null(value: Any) -> Any:
    """Rows of a table give every key that any row has; the absent ones are null."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
