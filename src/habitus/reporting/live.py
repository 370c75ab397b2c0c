"""The panel on top of a page whose study still runs: how far it is, the best so far, who works on what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from habitus.reporting.colours import asset
from habitus.reporting.figure import Line, Mark, Panel, PlotAxis, Rule
from habitus.reporting.format import significant
from habitus.reporting.runs import better
from habitus.reporting.svg import draw

LiveState = Literal["running", "idle", "over", "stopped"]
_TITLES = {
    "running": "Running",
    "idle": "Nothing is running",
    "over": "The study has ended",
    "stopped": "The study was stopped",
}


@dataclass(frozen=True)
class LiveAxis:
    """Runs of one axis."""

    name: str
    done: int
    total: int
    failed: int = 0

    @property
    def percent(self) -> float:
        return round(100 * self.done / max(1, self.total), 1)


@dataclass(frozen=True)
class LiveRun:
    """A run that a worker is at."""

    title: str
    worker: str
    steps: int
    step: int | None = None  # the last one in its journal
    loss: float | None = None


@dataclass(frozen=True)
class LiveLog:
    """What a worker wrote down, the newest line last."""

    worker: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Live:
    """A study at one moment."""

    state: LiveState = "idle"
    doing: str = ""  # the axis that is run, in words
    axes: tuple[LiveAxis, ...] = ()
    metric: str = ""
    curve: Sequence[float] = ()  # the best value after each run that ended
    baseline: float | None = None
    facts: tuple[tuple[str, str], ...] = ()  # time left, cores, GPUs
    runs: tuple[LiveRun, ...] = ()
    failures: tuple[tuple[str, int], ...] = ()  # reason, how often
    logs: tuple[LiveLog, ...] = ()
    problem: str = ""  # why there is no figure yet, or what cannot be read


def render_live(live: Live, page: int) -> str:
    """The panel as HTML; `page` counts how often the figures below it were drawn anew."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(asset("live.html")).render(
        live=live,
        page=page,
        title=_TITLES[live.state],
        best=significant(live.curve[-1]) if live.curve else "",
        curve=Markup(draw(_curve_panel(live))) if live.curve else "",
        baseline="" if live.baseline is None else significant(live.baseline),
    )


def _curve_panel(live: Live) -> Panel:
    """The best value over the runs that ended, as steps, and the best baseline."""
    xs: list[float] = []
    ys: list[float] = []
    for number, value in enumerate(live.curve, 1):
        if ys and value != ys[-1]:
            xs.append(number)
            ys.append(ys[-1])
        if not ys or value != ys[-1] or number == len(live.curve):
            xs.append(number)
            ys.append(value)
    marks: list[Mark] = [Line(xs, ys, "main")]
    if live.baseline is not None:
        marks.append(Rule(live.baseline, "y", "paper", "best baseline"))
    last = max(2, len(live.curve))
    ticks = tuple(float(number) for number in range(-(-last // 6), last + 1, -(-last // 6)))
    ends = PlotAxis("runs that ended", kind="count", low=1.0, high=float(last), ticks=ticks)
    return Panel(f"Best so far: {better(live.metric)}", ends, PlotAxis(live.metric), tuple(marks))
