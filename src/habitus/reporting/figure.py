"""What the page shows, without how it is drawn: panels of marks and tables, in exhibits, in chapters.

`svg.py` and `png.py` each draw a Panel; colours are names (`b0`..`b9` budgets from small to large, `main`, `paper`,
`muted`, `s0`..`s7` series without an order) that the page's style sheet and the PNG writer give a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["plain", "count", "percent", "flops", "rate"]


@dataclass(frozen=True)
class PlotAxis:
    """One axis: its label, scale and the kind of number it shows."""

    label: str
    log: bool = False
    kind: Kind = "plain"
    low: float | None = None
    high: float | None = None
    zero_at: float | None = None  # where zero is drawn on a logarithmic axis
    ticks: tuple[float, ...] = ()
    tick_names: tuple[str, ...] = ()  # of the ticks, where values stand for names


@dataclass(frozen=True)
class Points:
    """Dots, each with the text shown when it is pointed at; `low` and `high` are error bars along `bars`.

    Dots of runs name them: a tip is then the values of `metrics`, and the page adds what the run was.
    """

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    tips: Sequence[str] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    bars: Literal["x", "y"] = "y"
    hollow: bool = False
    ring: bool = False  # an outline only, so that what lies below shows
    shape: Literal["circle", "diamond", "square"] = "circle"
    large: bool = False
    label: str = ""
    runs: Sequence[int] = ()  # positions among the runs of the laws
    metrics: Sequence[str] = ()
    num_hidden: int = 0  # runs that are not drawn


@dataclass(frozen=True)
class Line:
    """A curve, with a label at its right end."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    dashed: bool = False
    thick: bool = False


@dataclass(frozen=True)
class Band:
    """An interval along a curve."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str
    whole: bool = False  # whether the axis is long enough for all of it


@dataclass(frozen=True)
class Rule:
    """A straight line across the panel at one value of one axis."""

    at: float
    along: Literal["x", "y"]  # "x": vertical, at a value of x
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Heat:
    """A matrix of numbers from -1 to 1; None stays empty, faded cells are pale."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    tips: tuple[tuple[str, ...], ...]
    faded: tuple[tuple[bool, ...], ...] = ()


Mark = Points | Line | Band | Rule


@dataclass(frozen=True)
class Panel:
    """One drawing: axes and marks, or a matrix."""

    title: str
    x: PlotAxis | None = None
    y: PlotAxis | None = None
    marks: tuple[Mark, ...] = ()
    heat: Heat | None = None
    labels: Literal["end", "margin"] = "end"  # where labels stand: at the end of their line, or beside the panel


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names the row. Notes stand below it."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """What an exhibit shows for one metric; metric '' is for all of them."""

    reading: str
    metric: str = ""
    panels: tuple[Panel, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Sheet:
    """The numbers behind an exhibit, as they are downloaded."""

    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]  # text, numbers, None where a value is missing


@dataclass(frozen=True)
class Exhibit:
    """A figure or a table of the page: one view, or one per metric."""

    key: str
    title: str
    views: tuple[View, ...]
    sheet: Sheet
    how: str = ""  # how to read it, one sentence

    @property
    def is_figure(self) -> bool:
        """Whether it is numbered as a figure. One whose law refuses has a sentence only, and is one too."""
        return all(view.table is None for view in self.views)

    @property
    def is_empty(self) -> bool:
        """Whether it has a sentence only."""
        return not any(view.panels or (view.table and view.table.rows) for view in self.views)

    @property
    def num_hidden(self) -> int:
        """Runs that its figures leave out, so that the page stays small."""
        marks = [mark for view in self.views for panel in view.panels for mark in panel.marks]
        return sum(mark.num_hidden for mark in marks if isinstance(mark, Points))


@dataclass(frozen=True)
class Chapter:
    """Exhibits under one heading."""

    key: str
    title: str
    exhibits: tuple[Exhibit, ...]


@dataclass(frozen=True)
class MissingExhibit:
    """An exhibit that this store does not support, and the command that would measure it."""

    title: str
    command: str


@dataclass(frozen=True)
class Contents:
    """The whole page in order."""

    chapters: tuple[Chapter, ...]
    missing: tuple[MissingExhibit, ...]

    @property
    def exhibits(self) -> list[Exhibit]:
        return [exhibit for chapter in self.chapters for exhibit in chapter.exhibits]

    @property
    def missing_by_command(self) -> dict[str, list[str]]:
        """What each command would add."""
        commands: dict[str, list[str]] = {}
        for item in self.missing:
            commands.setdefault(item.command, []).append(item.title)
        return commands
