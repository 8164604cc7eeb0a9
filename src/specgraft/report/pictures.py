"""The pictures of the page. Each takes plain numbers and returns inline SVG. Colours are told apart by marker too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgraft.report.svg import INK, MUTED, PAPER, SERIES, drawn, whole_numbers
from specgraft.report.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.8  # inches; all pictures are as wide as a phone
SMALL = 10  # points
MARKERS, DASHES = ("o", "s"), ("-", "--")
POINTS = 400  # of one curve, at most

Curve = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Bars:
    """Accept length of one temperature, by group."""

    label: str
    values: dict[str, tuple[float, int]]  # group -> accept length, requests


def losses(curves: dict[str, Curve], alt: str) -> str:
    """One small panel each: their scales differ."""

    def draw(figure: Figure) -> None:
        rows = math.ceil(len(curves) / 2)
        panels = list(figure.subplots(rows, 2, squeeze=False, sharex=True).flat)
        for axes, (name, curve) in zip(panels, curves.items(), strict=False):
            steps, values = thinned(curve)
            smooth = smoothed(values)
            axes.plot(steps, values, color=SERIES[0], alpha=0.3, linewidth=0.9)
            axes.plot(steps, smooth, color=SERIES[0], marker="o" if len(steps) < 3 else "", markersize=4)
            axes.set_title(name)
            if min(values) >= 0:
                axes.set_ylim(0, 1.08 * max(values) or 1)
            whole_numbers(axes)
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        figure.supxlabel("step", fontsize=11)

    return drawn("losses", alt, (WIDTH, 1.3 + 1.5 * math.ceil(len(curves) / 2)), draw)


def accept_curve(curve: Curve, alt: str) -> str:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(*zip(*curve, strict=True), color=SERIES[0], marker="o", markersize=4.5)
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=":")
        axes.text(
            0.995,
            1,
            "no draft accepted",
            color=MUTED,
            fontsize=SMALL,
            ha="right",
            va="bottom",
            transform=axes.get_yaxis_transform(),
        )
        last = curve[-1]
        axes.annotate(f"{last[1]:.2f}", last, xytext=(-4, 7), textcoords="offset points", ha="right")
        axes.set_xlabel("step")
        axes.set_ylabel("accept length")
        top = max(value for _, value in curve)
        axes.set_ylim(0.95, 1 + 1.2 * max(top - 1, 0.2))
        whole_numbers(axes)

    return drawn("accept-curve", alt, (WIDTH, 2.9), draw)


def groups(name: str, bars: Sequence[Bars], alt: str) -> str:
    """Horizontal bars from zero, one per group and temperature, each with its value and n."""
    names = list(dict.fromkeys(group for part in bars for group in part.values))
    thick = 0.8 / len(bars)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        longest = 1.0
        for index, part in enumerate(bars):
            for row, group in enumerate(names):
                if group not in part.values:
                    continue
                value, n = part.values[group]
                place = row - 0.4 + thick * (index + 0.5)
                longest = max(longest, value)
                axes.barh(
                    place, value, height=thick * 0.88, color=SERIES[index], edgecolor=PAPER, linewidth=0.5,
                    hatch="//" if index else None, label=part.label if row == _first(names, part) else None,
                )  # fmt: skip
                beside(axes, value, place, f"{value:.2f}, n={n}")
        axes.axvline(1, color=MUTED, linewidth=1, linestyle=":")
        axes.set_yticks(range(len(names)), [shortened(group, 18) for group in names])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.32)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("accept length (dotted: no draft accepted)")
        figure.legend(loc="outside upper right", ncols=2)

    return drawn(name, alt, (WIDTH, 1.2 + 0.28 * len(names) * (len(bars) + 0.35)), draw)


def _first(names: Sequence[str], part: Bars) -> int:
    return next(row for row, group in enumerate(names) if group in part.values)


def positions(series: dict[str, tuple[list[float], list[float]]], alt: str) -> str:
    """label -> (survival, conditional acceptance), by draft position."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, which, title in zip(panels, (0, 1), ("survival", "conditional acceptance"), strict=True):
            for index, (label, both) in enumerate(series.items()):
                values = both[which]
                axes.plot(
                    range(1, len(values) + 1), values, color=SERIES[index], marker=MARKERS[index], markersize=4.5,
                    linestyle=DASHES[index], label=label if which == 0 else None,
                )  # fmt: skip
            axes.set_title(title)
            axes.set_ylim(0, 1)
            axes.set_xlabel("draft position")
            depth = max(len(both[which]) for both in series.values())
            axes.set_xticks(range(1, depth + 1, 1 + depth // 9))
        panels[0].set_ylabel("share")
        figure.legend(loc="outside upper right", ncols=2)

    return drawn("positions", alt, (WIDTH, 3.0), draw)


def reliability(bins: Sequence[tuple[float, float, int]], alt: str) -> str:
    """(mean prediction, share accepted, count) of each bin: the curve above, the counts below."""

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        predicted, accepted, counts = (list(column) for column in zip(*bins, strict=True))
        upper.plot((0, 1), (0, 1), color=MUTED, linewidth=1, linestyle=":")
        upper.plot(predicted, accepted, color=SERIES[0], marker="o", markersize=5)
        upper.set_ylabel("accepted")
        upper.set_ylim(0, 1)
        upper.set_xlim(0, 1)
        lower.bar(predicted, counts, width=0.055, color=SERIES[0], alpha=0.75)
        for place, height in zip(predicted, counts, strict=True):
            lower.text(place, height, _compact(height), ha="center", va="bottom", fontsize=8, color=INK)
        lower.set_ylim(0, 1.3 * max(counts))
        lower.set_ylabel("count")
        lower.set_yticks([])
        lower.set_xlabel("predicted acceptance")

    return drawn("reliability", alt, (WIDTH, 4.1), draw)


def step_times(rows: Sequence[tuple[str, dict[str, float]]], marks: dict[str, float], alt: str) -> str:
    """Stacked parts of a step, in ms, one bar a row; `marks` gives, per row, the step at which it breaks even."""
    parts = list(dict.fromkeys(part for _, times in rows for part in times))
    look = {
        part: (SERIES[index], hatch)
        for index, (part, hatch) in enumerate(zip(parts, (None, "//", "..", "xx"), strict=False))
    }

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        seen: set[str] = set()
        for row, (name, times) in enumerate(rows):
            left = 0.0
            for part, value in times.items():
                colour, hatch = look[part]
                axes.barh(
                    row, value, left=left, height=0.55, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0.5,
                    label=None if part in seen else part,
                )  # fmt: skip
                seen.add(part)
                left += value
            beside(axes, left, row, f"{left:.1f} ms")
            if name in marks:
                axes.plot([marks[name]] * 2, (row - 0.38, row + 0.38), color=INK, linewidth=2)
        if marks:
            axes.plot([], [], color=INK, linewidth=2, label="pays left of here")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        longest = max([sum(times.values()) for _, times in rows] + list(marks.values()))
        axes.set_xlim(0, 1.22 * longest)
        axes.set_xlabel("ms per step")
        figure.legend(loc="outside upper center", ncols=3)

    return drawn("step-times", alt, (WIDTH, 1.5 + 0.5 * len(rows)), draw)


def beside(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL)


def _compact(value: int) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else str(value)


def thinned(curve: Curve) -> tuple[list[float], list[float]]:
    """At most POINTS points, each the mean of its neighbours: a page need not hold every step."""
    size = math.ceil(len(curve) / POINTS)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [part[-1][0] for part in parts], [math.fsum(value for _, value in part) / len(part) for part in parts]


def smoothed(values: list[float]) -> list[float]:
    """Mean over a window around each point, a tenth of the curve wide, at most 25 points."""
    half = min(12, len(values) // 20)
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]
