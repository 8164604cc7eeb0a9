"""What the page is made of. The template knows these shapes and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A row of the headline: one result with everything needed to read it rightly."""

    what: str
    value: str
    beside: str = ""  # said right under the value
    note: str = ""  # how it was measured
    tone: str = ""  # "good", "bad", "missing" or nothing


@dataclass(frozen=True)
class Headline:
    lines: Sequence[Line]
    kind: str = "headline"


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()  # columns set flush right
    status: int | None = None  # the column whose words are coloured
    caption: str = ""
    folded: str = ""  # shown behind this summary
    kind: str = "table"


@dataclass(frozen=True)
class Picture:
    svg: str  # made here, inserted as it is
    caption: str
    table: Table | None = None  # the same numbers, for those who cannot see the picture
    kind: str = "picture"


@dataclass(frozen=True)
class Piece:
    text: str
    source: str  # "prefill", "draft" or "target"


@dataclass(frozen=True)
class Example:
    title: str
    note: str
    language: str
    prompt: str
    pieces: Sequence[Piece]
    kind: str = "example"


@dataclass(frozen=True)
class Legend:
    """Of the coloured generations."""

    kind: str = "legend"


@dataclass(frozen=True)
class Stretch:
    text: str
    supervised: bool


@dataclass(frozen=True)
class Masked:
    """A conversation with its loss mask."""

    title: str
    note: str
    language: str
    stretches: Sequence[Stretch]
    kind: str = "masked"


@dataclass(frozen=True)
class MaskLegend:
    """Of the conversations with masks."""

    kind: str = "mask-legend"


@dataclass(frozen=True)
class Paragraph:
    text: str
    kind: str = "paragraph"


@dataclass(frozen=True)
class Code:
    text: str
    summary: str
    kind: str = "code"


Block = Headline | Table | Picture | Example | Legend | Masked | MaskLegend | Paragraph | Code


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
    missing: str = ""  # why there is nothing, where there is nothing
    lead: str = ""  # said first, above the pictures
