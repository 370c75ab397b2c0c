"""The figures as PNG files, drawn by matplotlib from the same panels as the page."""

import math
import re
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError
from habitus.reporting.colours import LIGHT, colour_values, correlation_colours
from habitus.reporting.figure import Band, Contents, Heat, Line, Panel, PlotAxis, Points, View
from habitus.reporting.scales import Scale, values_of
from habitus.reporting.study import Study
from habitus.reporting.svg import push_apart

_SHAPES = {"circle": "o", "diamond": "D", "square": "s"}


def write_pngs(study: Study, contents: Contents, folder: Path) -> list[Path]:
    """One PNG per figure and metric in `folder`, at 200 dots per inch; older ones of the same names are replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--png {folder} cannot be created: {error.strerror}", expected="a folder") from None
    colours = colour_values(len(study.budgets))
    written = []
    number = 0
    for exhibit in contents.exhibits:
        if not exhibit.is_figure:
            continue
        number += 1
        for view in exhibit.views:
            if view.panels:
                suffix = "-" + re.sub(r"[^a-z0-9]+", "-", view.metric.lower()).strip("-") if view.metric else ""
                path = folder / f"figure-{number:02d}-{exhibit.key}{suffix}.png"
                _write(view, colours, path)
                written.append(path)
    return written


def _write(view: View, colours: dict[str, str], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(view.panels), 2)
    rows = math.ceil(len(view.panels) / columns)
    figure = Figure(figsize=(4.8 * columns, 3.4 * rows), dpi=200, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    FigureCanvasAgg(figure)
    for i, panel in enumerate(view.panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold", color=LIGHT["ink"])
        if panel.heat is not None:
            _heat(axes, panel.heat)
        else:
            _plot(axes, panel, colours)
    figure.savefig(path)


def _plot(axes: Any, panel: Panel, colours: dict[str, str]) -> None:
    for which, axis in (("x", panel.x or PlotAxis("x")), ("y", panel.y or PlotAxis("y"))):
        _axis(axes, which, axis, panel)
    for mark in panel.marks:
        colour = colours[mark.colour]
        if isinstance(mark, Line):
            width = 6 if mark.thick else 1.2
            axes.plot(
                _x(panel, mark.x),
                mark.y,
                color=colour,
                lw=width,
                ls="--" if mark.dashed else "-",
                alpha=0.3 if mark.thick else 1,
            )
        elif isinstance(mark, Band):
            axes.fill_between(mark.x, mark.low, mark.high, color=colour, alpha=0.15, lw=0)
        elif isinstance(mark, Points):
            _points(axes, panel, mark, colour)
        elif mark.along == "x":
            axes.axvline(mark.at, color=colour, lw=1, ls="--")
            _label(axes, mark.label, (mark.at, 0.93), colour, (3, 0), ("data", "axes fraction"))
        else:
            axes.axhline(mark.at, color=colour, lw=1, ls="--")
            _label(axes, mark.label, (0.01, mark.at), colour, (0, 2), ("axes fraction", "data"))
    _end_labels(axes, panel, colours)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=LIGHT["grid"], lw=0.7)
    axes.tick_params(labelsize=7.5, colors=LIGHT["soft"], left=False)
    axes.margins(x=0.08)


def _end_labels(axes: Any, panel: Panel, colours: dict[str, str]) -> None:
    """Labels at the end of their marks, moved apart as on the page."""
    axes_of = (("x", panel.x or PlotAxis("")), ("y", panel.y or PlotAxis("")))
    x, y = (Scale(a, values_of(panel.marks, w, a.log), 0, 1) for w, a in axes_of)
    labels = []
    for mark in panel.marks:
        if isinstance(mark, Line | Points) and mark.label:
            ends = [(a, b) for a, b in zip(_x(panel, mark.x), mark.y, strict=True) if math.isfinite(a + b)]
            if ends:
                a, b = max(ends)
                at = 1.0 if panel.labels == "margin" else min(x.at(a), 1.0)
                labels.append((max(0.0, min(1.0, y.at(b))), at, mark.label, colours[mark.colour]))
    labels.sort(key=lambda item: item[0])
    places = push_apart([item[0] for item in labels], 0.055, 0.0, 1.0)
    for place, (_, at, text, colour) in zip(places, labels, strict=True):
        _label(axes, text, (at, place), colour, (6, -3), "axes fraction")


def _label(axes: Any, text: str, at: tuple[float, float], colour: str, shift: tuple[float, float], where: Any) -> None:
    axes.annotate(text, at, xytext=shift, xycoords=where, textcoords="offset points", color=colour, fontsize=7.5)


def _axis(axes: Any, which: str, axis: PlotAxis, panel: Panel) -> None:
    scale = Scale(axis, values_of(panel.marks, which, axis.log), 0, 1)
    if axis.log:
        getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}label")(axis.label, fontsize=8, color=LIGHT["soft"])
    ticks = [(axis.zero_at if value == 0 and axis.zero_at else value, text) for value, text in scale.ticks()]
    getattr(axes, f"set_{which}ticks")([value for value, _ in ticks], [text for _, text in ticks])
    getattr(axes, f"set_{which}ticks")([], minor=True)
    getattr(axes, f"set_{which}lim")(scale.low, scale.high)


def _points(axes: Any, panel: Panel, mark: Points, colour: str) -> None:
    size = 34 if mark.large else 14
    xs = _x(panel, mark.x)
    if len(mark.low):
        centre = mark.y if mark.bars == "y" else xs
        errors = [
            [_gap(c, low) for c, low in zip(centre, mark.low, strict=True)],
            [_gap(high, c) for c, high in zip(centre, mark.high, strict=True)],
        ]
        bars = {f"{mark.bars}err": errors}
        axes.errorbar(xs, mark.y, **bars, fmt="none", ecolor=colour, elinewidth=1)
    face = "none" if mark.ring else "white" if mark.hollow else colour
    edge = colour if mark.hollow or mark.ring else "white"
    axes.scatter(xs, mark.y, s=size, marker=_SHAPES[mark.shape], facecolor=face, edgecolor=edge, lw=0.8, zorder=3)


def _heat(axes: Any, heat: Heat) -> None:
    for i, row in enumerate(heat.values):
        for j, value in enumerate(row):
            if value is not None:
                cell, ink = correlation_colours(value, bool(heat.faded and heat.faded[i][j]))
                axes.add_patch(_box(j, i, cell))
                axes.text(j, i, f"{value:.2f}".replace("-", "−"), ha="center", va="center", color=ink, fontsize=7)
    axes.set_xlim(-0.5, len(heat.columns) - 0.5)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(heat.columns)), heat.columns, rotation=40, ha="right", fontsize=7)
    axes.set_yticks(range(len(heat.rows)), heat.rows, fontsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def _box(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, lw=0)


def _x(panel: Panel, xs: Any) -> list[float]:
    """Values of x; zero stands where the axis puts it."""
    zero = panel.x.zero_at if panel.x is not None else None
    return [zero if x == 0 and zero else x for x in xs]


def _gap(upper: float, lower: float) -> float:
    """The length of an error bar; an open one is not drawn."""
    length = upper - lower
    return max(length, 0.0) if math.isfinite(length) else 0.0
