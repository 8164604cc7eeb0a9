"""The pictures of the on-policy section. Each takes plain numbers and returns inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgraft.report.pictures import SMALL, WIDTH, Curve, smoothed, thinned
from specgraft.report.svg import INK, PAPER, SERIES, drawn, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = 8  # drawn at most in one picture
FAINTEST = 0.4  # opacity of the last position's line
LABEL = 0.062  # height of a label, as a share of the axis
LEAST_SPAN = 0.1  # of the overlap's axis: noise is not to look like progress

BeforeAfter = tuple[list[float], list[float]]  # by position; either may be empty, NaN where nothing was measured


def before_after(name: str, what: str, panels: dict[str, BeforeAfter], alt: str) -> str:
    """Two bars a position, one panel a title: grey and hatched before, plain after."""

    def draw(figure: Figure) -> None:
        every = list(figure.subplots(1, len(panels), sharey=True, squeeze=False).flat)
        labelled: set[str] = set()
        for axes, (title, both) in zip(every, panels.items(), strict=True):
            depth = max(len(values) for values in both)
            shown = [(label, values) for label, values in zip(("before", "after"), both, strict=True) if values]
            thick = 0.8 / len(shown)
            for index, (label, values) in enumerate(shown):
                places = [slot + 0.6 + thick * (index + 0.5) for slot in range(len(values))]
                old = label == "before"
                axes.bar(
                    places, [0.0 if math.isnan(value) else value for value in values], width=0.9 * thick, edgecolor=PAPER,
                    color=SERIES[3] if old else SERIES[0], linewidth=0.5, hatch="////" if old else None,
                    label=None if label in labelled else label,
                )  # fmt: skip
                labelled.add(label)
            if len(panels) > 1:
                axes.set_title(title)
            axes.set_xticks(range(1, depth + 1, 1 + depth // 9))
            axes.set_xlim(0.4, depth + 0.6)
            axes.set_xlabel("draft position")
            axes.grid(axis="x", visible=False)
            axes.tick_params(axis="x", length=0)
        top = max((value for both in panels.values() for values in both for value in values if value > 0), default=1.0)
        every[0].set_ylim(0, min(1.0, 1.08 * top))
        every[0].set_ylabel(what)
        figure.legend(loc="outside upper right", ncols=2)

    return drawn(name, alt, (WIDTH, 2.9), draw)


def shown_positions(depth: int) -> list[int]:
    """Positions, counted from 1, that get a line: all, or LINES of them from the first to the last."""
    if depth <= LINES:
        return list(range(1, depth + 1))
    return sorted({round(1 + place * (depth - 1) / (LINES - 1)) for place in range(LINES)})


def overlaps(curves: dict[int, Curve], alt: str) -> str:
    """position -> overlap by step, smoothed. The line of a later position is paler, and each is named where it ends."""
    last = max(curves)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        ends: list[tuple[float, int]] = []
        for position, curve in curves.items():
            steps, values = thinned(curve)
            smooth = smoothed(values)
            axes.plot(
                steps, smooth, color=SERIES[0], alpha=1 - (1 - FAINTEST) * (position - 1) / max(1, last - 1),
                marker="o" if len(steps) < 3 else "", markersize=4,
            )  # fmt: skip
            ends.append((smooth[-1], position))
        low, high = axes.get_ylim()
        if (short := LEAST_SPAN - (high - low)) > 0:
            low, high = low - short / 2, high + short / 2
        axes.set_ylim(low, high)
        axes.margins(x=0.01)
        _name_ends(axes, ends, low, high)
        axes.set_xlabel("step")
        axes.set_ylabel("overlap")
        whole_numbers(axes)

    return drawn("on-policy-overlap", alt, (WIDTH, 3.1), draw)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, int]], low: float, high: float) -> None:
    """Labels right of the axis, in the order of the lines' ends, moved apart where they would touch."""
    ordered = sorted(ends, key=lambda end: (-end[0], end[1]))
    gap = LABEL * (high - low)
    places = [end[0] for end in ordered]
    for index in range(1, len(places)):
        places[index] = min(places[index], places[index - 1] - gap)
    places[-1] = max(places[-1], low)
    for index in range(len(places) - 2, -1, -1):
        places[index] = max(places[index], places[index + 1] + gap)
    for place, (_, position) in zip(places, ordered, strict=True):
        axes.annotate(
            str(position), (1, place), xycoords=axes.get_yaxis_transform(), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=SMALL, color=INK, annotation_clip=False,
        )  # fmt: skip


def over_steps(name: str, curve: Curve, label: str, alt: str, digits: int = 2) -> str:
    """One curve, pale as logged and strong smoothed, with its last smoothed value."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        end = _pale_and_strong(axes, curve)
        axes.annotate(
            f"{end[1]:,.{digits}f}", (1, end[1]), xycoords=axes.get_yaxis_transform(), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=SMALL, annotation_clip=False,
        )  # fmt: skip
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.margins(x=0.01, y=0.2)
        whole_numbers(axes)

    return drawn(name, alt, (WIDTH, 3.1), draw)


def _pale_and_strong(axes: Axes, curve: Curve) -> tuple[float, float]:
    steps, values = thinned(curve)
    smooth = smoothed(values)
    axes.plot(steps, values, color=SERIES[0], alpha=0.3, linewidth=0.9)
    axes.plot(steps, smooth, color=SERIES[0], marker="o" if len(steps) < 3 else "", markersize=4)
    return steps[-1], smooth[-1]


def tempo(rate: Curve, parts: dict[str, float], labels: dict[str, str], alt: str) -> str:
    """Supervised tokens per second by step, and under it the share of a step that each part takes; either may be empty."""

    def draw(figure: Figure) -> None:
        ratios = ([3] if rate else []) + ([1] if parts else [])
        panels = list(figure.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False).flat)
        if rate:
            axes = panels[0]
            _pale_and_strong(axes, rate)
            axes.set_ylim(0, 1.1 * max(value for _, value in rate))
            axes.set_ylabel("tokens per second")
            axes.set_xlabel("step")
            whole_numbers(axes)
        if parts:
            axes, left = panels[-1], 0.0
            whole = math.fsum(parts.values())
            for (part, value), colour, hatch in zip(parts.items(), SERIES, (None, "//", "..", "xx"), strict=False):
                share = 100 * value / whole
                axes.barh(0, share, left=left, height=0.6, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0.5, label=labels[part])
                left += share
            axes.set_xlim(0, 100)
            axes.set_yticks([])
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
            axes.set_xlabel("% of a step")
            figure.legend(loc="outside lower center", ncols=len(parts), handlelength=1.4, columnspacing=1.2)

    return drawn("on-policy-tempo", alt, (WIDTH, 0.9 + (2.2 if rate else 0) + (0.9 if parts else 0)), draw)
