"""`report`: what a run has left in its folder -> one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from specgraft import __version__
from specgraft.report import bench, data, headline, measured, onpolicy, sections
from specgraft.report.blocks import Section
from specgraft.report.read import Found, at, draft_tokens, found
from specgraft.report.text import plain, printable
from specgraft.run_dir import RunDir, write_text

# title, what makes it (None: a run of this kind has no such part), and how it lies on a wide screen:
# "half" beside its neighbour, "columns" its blocks side by side
ORDER: tuple[tuple[str, Callable[[Found], Section | None], str], ...] = (
    ("Result", headline.headline, ""),
    (bench.TITLE, bench.bench, ""),
    ("Gates", sections.gates, ""),
    ("What was run", sections.what_was_run, "columns"),
    (data.TITLE, data.data, ""),
    ("Loss curves", sections.training, "half"),
    ("Accept length while training", sections.validation, "half"),
    (onpolicy.TITLE, onpolicy.on_policy, ""),
    ("Accept length by domain and language", measured.by_group, ""),
    ("Acceptance by draft position", measured.positions, "half"),
    ("Confidence", measured.confidence, "half"),
    ("Where a step goes", measured.step_times, ""),
    ("Generations", measured.examples, ""),
    ("Config", sections.full_config, ""),
)


def report(run: RunDir) -> Path:
    """Writes `run.report` and returns its path. Works at any point of a run: a part not there yet says so.

    The page needs no other file and no network. Raises ValueError where the folder is missing or cannot be written.
    """
    if not run.root.is_dir():
        raise ValueError(f"{run.root}: no such run folder; `specgraft pilot` makes one")
    write_text(run.report, page(found(run)))
    return run.report


def page(run: Found) -> str:
    """The HTML of the page. Everything but our own pictures is escaped."""
    from jinja2 import Environment, StrictUndefined

    source = files("specgraft.report").joinpath("template.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made = [(_guarded(title, make, run), layout) for title, make, layout in ORDER]
    text = environment.from_string(source).render(
        name=run.name,
        subtitle=_subtitle(run),
        sections=[(section, layout) for section, layout in made if section is not None],
        damaged=run.damaged,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )
    return printable(text)


def _guarded(title: str, make: Callable[[Found], Section | None], run: Found) -> Section | None:
    """A file of a half-finished run can hold anything; it costs its own section, never the page."""
    name = title.lower().replace(" ", "-")
    try:
        return make(run)
    except ImportError as error:
        return Section(name, title, missing=f"{error.name} is not installed: pip install 'specgraft[report]'.")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return Section(name, title, missing=f"This part could not be shown ({type(error).__name__}: {error}).")


def _subtitle(run: Found) -> str:
    parts = [
        f"target {plain(at(run.config, 'target', 'id'))}" if at(run.config, "target", "id") else "",
        f"drafter {plain(at(run.config, 'drafters', 'kind'))}" if at(run.config, "drafters", "kind") else "",
        f"{g} draft tokens per round" if (g := draft_tokens(run)) else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing is known of this run yet"
