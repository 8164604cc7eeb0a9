"""Who imports whom (DESIGN section 3), and what is not loaded for a command that needs no model."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specgraft

ROOT = Path(specgraft.__file__).parent
NOUNS = {"records", "config", "run_file", "log", "run_dir"}  # may be imported by every folder
ENTRY = {"cli", "run", "__init__", "__main__"}
ANYTHING = None
MAY_IMPORT: dict[str, set[str] | None] = {
    "ops": set(),
    "engines": set(),
    "plan": set(),
    "targets": {"ops"},
    "drafters": {"ops"},
    "stream": {"targets"},
    "regen": {"engines", "targets"},
    "capture": {"targets", "engines", "stream"},
    "decode": {"ops", "targets", "drafters"},
    "distill": {"ops", "targets", "drafters", "decode"},
    "evaluate": {"targets", "drafters", "decode"},
    "train": {"stream", "targets", "drafters", "distill", "evaluate"},
    "export": {"drafters"},
    "bench": {"engines", "plan"},
    "check": {"targets", "drafters", "decode", "export"},
    "report": {"plan"},
    "pilot": ANYTHING,
}
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py")))
FILES = sorted(ROOT.rglob("*.py"))


def imported(source: str, package: str) -> Iterator[str]:
    """First word behind `specgraft.` of every import in a file of `package`, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "specgraft" else [base]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "specgraft" and rest:
                yield rest.split(".")[0]


def imports_of(path: Path) -> set[str]:
    package = ".".join(("specgraft", *path.relative_to(ROOT).parent.parts))
    return {name for name in imported(path.read_text(encoding="utf-8"), package) if not name.startswith("__")}


def imports_of_folder(folder: str) -> set[str]:
    return set().union(*(imports_of(path) for path in (ROOT / folder).rglob("*.py"))) - {folder}


def test_the_walk_sees_every_kind_of_import() -> None:
    source = """
import specgraft.ops.sampling
from specgraft import targets, __version__
from .family import expand
from ..stage import regen
from ... import log
if TYPE_CHECKING:
    from specgraft.stream.shards import ShardReader
def late():
    from specgraft.train.stage import train
    import torch
"""
    assert set(imported(source, "specgraft.regen.builtin")) == {
        "ops", "targets", "__version__", "regen", "log", "stream", "train",
    }  # fmt: skip


def test_every_folder_is_in_the_table() -> None:
    assert set(FOLDERS) <= set(MAY_IMPORT)
    assert {path.stem for path in ROOT.glob("*.py")} == NOUNS | ENTRY


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_table_allows(folder: str) -> None:
    may = MAY_IMPORT[folder]
    if may is ANYTHING:
        return
    assert imports_of_folder(folder) <= may | NOUNS


def test_the_nouns_import_only_nouns() -> None:
    for noun in NOUNS:
        assert imports_of(ROOT / f"{noun}.py") <= NOUNS, noun


def test_nothing_imports_the_entry_or_the_pilot_except_each_other() -> None:
    for path in FILES:
        if path.parent != ROOT and path.relative_to(ROOT).parts[0] != "pilot":
            assert not imports_of(path) & {"cli", "run", "pilot"}, path


def test_folders_have_no_cycle() -> None:
    graph = {folder: imports_of_folder(folder) & set(FOLDERS) for folder in FOLDERS}
    while leaves := [folder for folder, needs in graph.items() if not needs]:
        graph = {folder: needs - set(leaves) for folder, needs in graph.items() if folder not in leaves}
    assert not graph, f"a cycle lies within {sorted(graph)}"


def test_folder_init_files_are_empty() -> None:
    full = [path for path in ROOT.rglob("__init__.py") if path.parent != ROOT and path.read_text(encoding="utf-8").strip()]
    assert full == []


def test_help_plan_and_a_faulty_config_load_neither_torch_nor_transformers() -> None:
    commands = [
        ["--help"],
        ["train", "--help"],
        ["plan", "breakeven", "--published"],
        ["version"],
        ["train", "train.lrr=1"],
        ["pilot", "no-such-file.toml"],
        ["regen", "--allow", "no such gate"],
    ]
    program = f"""
import contextlib, io, json, sys
from specgraft import cli
rows = []
for arguments in {commands!r}:
    sys.argv = ["specgraft", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    rows.append([code, sorted({{"torch", "transformers"}} & set(sys.modules))])
print(json.dumps(rows))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT.parent), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, []]] * 4 + [[2, []]] * 3
