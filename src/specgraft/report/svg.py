"""matplotlib figures as inline SVG: text stays text, and colours are the page's own, so that dark mode follows."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colours drawn here -> CSS variables of template.html
INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
SERIES = ("#0a0b11", "#0a0b12", "#0a0b13", "#0a0b14")
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"series-{index}" for index, colour in enumerate(SERIES, start=1)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a domain may be named a$b$c
    "axes.unicode_minus": False,
    "font.size": 11,
    "font.family": "DejaVu Sans",  # shipped with matplotlib: only for the layout, the page sets its own
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.8,
}


def drawn(name: str, alt: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    """Runs `draw` on an empty figure of `size` inches. Returns SVG whose ids begin with `name`; `alt` is its text."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layout font lacks Korean and Japanese; the browser's does not
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue().decode("utf-8"), name, alt)


def _inline(svg: str, name: str, alt: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = re.match(r"<svg[^>]*>", svg), ""
    assert head is not None
    rest = svg[head.end() :].strip()
    box = re.search(r'viewBox="([^"]*)"', head.group())
    assert box is not None
    rest = rest.replace("xlink:href", "href")
    rest = re.sub(r'\bid="', f'id="{name}-', rest)  # ids are one namespace for the whole page
    rest = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", rest)
    for colour, variable in _VARIABLES.items():
        rest = rest.replace(colour, f"var(--{variable})")
    return f'<svg viewBox="{box.group(1)}" role="img" aria-label="{escape(alt)}"><title>{escape(alt)}</title>{rest}'


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=(1, 2, 2.5, 5, 10)))
