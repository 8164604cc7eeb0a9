"""Pictures of the run's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgraft.report import pictures
from specgraft.report.svg import INK, PAPER, SERIES
from specgraft.report.text import percent, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Quota:
    """Prompts of one cell of the mix."""

    name: str
    got: int
    wanted: int | None  # None: nothing was asked for


def quotas(parts: Sequence[Quota], alt: str) -> str:
    """Horizontal bars of what was got, with a line at what was asked for."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        longest = max([1, *(part.got for part in parts), *(part.wanted or 0 for part in parts)])
        asked = any(part.wanted is not None for part in parts)
        for row, part in enumerate(parts):
            axes.barh(row, part.got, height=0.62, color=SERIES[0], edgecolor=PAPER, linewidth=0.5, label="got" if row == 0 and asked else None)
            if part.wanted is not None:
                axes.plot([part.wanted] * 2, (row - 0.4, row + 0.4), color=INK, linewidth=2, label="asked for" if row == 0 else None)
            missing = f" ({part.wanted - part.got} missing)" if part.wanted is not None and part.got < part.wanted else ""
            pictures.beside(axes, max(part.got, part.wanted or 0), row, f"{part.got:,}{missing}")
        axes.set_yticks(range(len(parts)), [shortened(part.name, 22) for part in parts])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.3)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("train prompts")
        if asked:
            figure.legend(loc="outside upper right", ncols=2)

    return pictures.drawn("mix", alt, (pictures.WIDTH, 1.2 + 0.27 * len(parts)), draw)


def lengths(bands: dict[str, tuple[int, float | None]], alt: str) -> str:
    """Conversations of each band of tokens; beside the bar the share of supervised tokens."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, (count, share) in enumerate(bands.values()):
            axes.barh(row, count, height=0.62, color=SERIES[0], edgecolor=PAPER, linewidth=0.5)
            beside = f"{count:,}" + (f", {percent(share, 0)}" if share is not None else "")
            pictures.beside(axes, count, row, beside)
        axes.set_yticks(range(len(bands)), list(bands))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.4 * max([1, *(count for count, _ in bands.values())]))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_ylabel("tokens")
        axes.set_xlabel("conversations")

    return pictures.drawn("lengths", alt, (pictures.WIDTH, 1.2 + 0.3 * len(bands)), draw)
