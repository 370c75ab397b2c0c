"""Panels as SVG: few elements, colours through the style sheet, the text of each point in `data-t`."""

import math
from collections.abc import Sequence
from html import escape

from habitus.reporting.colours import correlation_colours
from habitus.reporting.figure import Band, Heat, Line, Mark, Panel, PlotAxis, Points, Rule
from habitus.reporting.scales import Scale, values_of

WIDTH, HEIGHT = 480.0, 330.0  # of a panel with axes; a matrix is as large as its cells
_LETTER = 6.6  # mean width of a letter at the size of a label
_TOP, _BOTTOM, _LINE = 30.0, 46.0, 13.5


def draw(panel: Panel) -> str:
    """One panel as an <svg> element that begins with its viewBox."""
    return _heat_map(panel, panel.heat) if panel.heat else _Plot(panel).svg()


def _text_width(text: str) -> float:
    return _LETTER * len(text)


class _Plot:
    """A panel with two axes."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.x_axis, self.y_axis = panel.x or PlotAxis("x"), panel.y or PlotAxis("y")
        labels = [m.label for m in panel.marks if isinstance(m, Line | Points) and m.label]
        ys = Scale(self.y_axis, values_of(panel.marks, "y", self.y_axis.log), 1, 0)
        self.left = 30.0 + max((_text_width(label) for _, label in ys.ticks()), default=20.0)
        self.right = 14.0 + max((_text_width(label) for label in labels), default=0.0)
        self.width, self.height = WIDTH - self.left - self.right, HEIGHT - _TOP - _BOTTOM
        self.x = Scale(self.x_axis, values_of(panel.marks, "x"), 0, self.width)
        self.y = Scale(self.y_axis, values_of(panel.marks, "y", self.y_axis.log), self.height, 0)

    def svg(self) -> str:
        parts = [
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" aria-hidden="true" focusable="false">',
            f'<text class="pt0" x="{self.left:.0f}" y="15">{escape(self.panel.title)}</text>',
            self._axes(),
            f'<svg x="{self.left:.1f}" y="{_TOP:g}" width="{self.width:.1f}" height="{self.height:g}">',
            *(self._mark(mark) for mark in self.panel.marks),
            "</svg>",
            self._labels(),
            "</svg>",
        ]
        return "".join(parts)

    def _axes(self) -> str:
        left, bottom, right = self.left, _TOP + self.height, self.left + self.width
        marks, labels = [], []
        last = -math.inf
        for value, label in self.x.ticks():
            at = left + self.x.at(value)
            marks.append(f"M{at:.1f} {bottom:.1f}v4")
            if at - last > _text_width(label) * 0.9 + 8:
                labels.append(f'<text x="{at:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escape(label)}</text>')
                last = at
        grid = []
        for value, label in self.y.ticks():
            at = _TOP + self.y.at(value)
            grid.append(f"M{left:.1f} {at:.1f}H{right:.1f}")
            labels.append(f'<text x="{left - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        middle = left + self.width / 2
        labels.append(
            f'<text class="al" x="{middle:.1f}" y="{HEIGHT - 6:g}" text-anchor="middle">'
            f"{escape(self.x_axis.label)}</text>"
        )
        if self.y_axis.label:
            labels.append(
                f'<text class="al" transform="translate(12 {_TOP + self.height / 2:.0f}) rotate(-90)" '
                f'text-anchor="middle">{escape(self.y_axis.label)}</text>'
            )
        axis = f"M{left:.1f} {bottom:.1f}H{right:.1f}" + "".join(marks)
        return f'<path class="gl" d="{"".join(grid)}"/><path class="ax" d="{axis}"/><g class="tk">{"".join(labels)}</g>'

    def _mark(self, mark: Mark) -> str:
        if isinstance(mark, Points):
            return self._runs(mark) if mark.runs else self._points(mark)
        if isinstance(mark, Line):
            style = "ln" + (" da" if mark.dashed else "") + (" th" if mark.thick else "")
            return f'<path class="{style} {mark.colour}" d="{self._path(mark.x, mark.y)}"/>'
        if isinstance(mark, Band):
            return self._band(mark)
        return self._rule(mark)

    def _points(self, mark: Points) -> str:
        parts = [f'<g class="{mark.colour}{" ho" if mark.hollow else " ri" if mark.ring else ""}">']
        bars = []
        for i, (low, high) in enumerate(zip(mark.low, mark.high, strict=True)):
            if mark.bars == "y":
                x = self.x.at(mark.x[i])
                bars.append(f"M{x:.1f} {self._end(self.y, low):.1f}V{self._end(self.y, high):.1f}")
            else:
                y = self.y.at(mark.y[i])
                bars.append(f"M{self._end(self.x, low):.1f} {y:.1f}H{self._end(self.x, high):.1f}")
        if bars:
            parts.append(f'<path class="eb" d="{"".join(bars)}"/>')
        size = (5.4 if mark.ring else 5.0) if mark.large else 3.4
        for i, (vx, vy) in enumerate(zip(mark.x, mark.y, strict=True)):
            if not (math.isfinite(vx) and math.isfinite(vy)):
                continue
            tip = f' data-t="{escape(mark.tips[i])}"' if mark.tips else ""
            x, y = self.x.at(vx), self.y.at(vy)
            if mark.shape == "circle":
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"{tip}/>')
            else:
                rotation = f' transform="rotate(45 {x:.1f} {y:.1f})"' if mark.shape == "diamond" else ""
                at = f'x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:g}" height="{2 * size:g}"'
                parts.append(f"<rect {at}{rotation}{tip}/>")
        return "".join(parts) + "</g>"

    def _runs(self, mark: Points) -> str:
        """Dots of runs as one path of points, with their values: there may be thousands on a page."""
        path, tips = [], []
        for i, (vx, vy) in enumerate(zip(mark.x, mark.y, strict=True)):
            if math.isfinite(vx) and math.isfinite(vy):
                path.append(f"M{self.x.at(vx):.1f} {self.y.at(vy):.1f}h0")
                tips.append(f"{mark.runs[i]} {mark.tips[i]}")
        data = f'data-n="{escape(" ".join(mark.metrics))}" data-r="{escape(",".join(tips))}"'
        return f'<path class="dt {mark.colour}" d="{"".join(path)}" {data}/>'

    def _end(self, scale: Scale, value: float) -> float:
        """The end of an error bar; an open one goes to the edge."""
        if math.isfinite(value) and (value > 0 or not scale.axis.log):
            return scale.at(value)
        low_end, high_end = (scale.start, scale.end)
        return high_end if value > 0 else low_end

    def _path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        parts, pen = [], "M"
        for vx, vy in zip(xs, ys, strict=True):
            if not (math.isfinite(vx) and math.isfinite(vy)):
                pen = "M"
                continue
            parts.append(f"{pen}{self.x.at(vx):.1f} {self.y.at(vy):.1f}")
            pen = "L"
        return "".join(parts)

    def _band(self, mark: Band) -> str:
        points = [(x, lo, hi) for x, lo, hi in zip(mark.x, mark.low, mark.high, strict=True) if math.isfinite(x)]
        upper = [f"{self.x.at(x):.1f} {self._end(self.y, hi):.1f}" for x, _, hi in points]
        lower = [f"{self.x.at(x):.1f} {self._end(self.y, lo):.1f}" for x, lo, _ in reversed(points)]
        return f'<path class="bd {mark.colour}" d="M{"L".join(upper + lower)}Z"/>' if points else ""

    def _rule(self, mark: Rule) -> str:
        if mark.along == "x":
            at = self.x.at(mark.at)
            d, x, y = f"M{at:.1f} 0V{self.height:.1f}", at + 4, 11.0
            anchor = ""
            if at + 4 + _text_width(mark.label) > self.width:
                x, anchor = at - 4, ' text-anchor="end"'
        else:
            at = self.y.at(mark.at)
            d, x, y, anchor = f"M0 {at:.1f}H{self.width:.1f}", 4.0, at - 4, ""
            if y < 10:
                y = at + 13
        label = f'<text class="lb {mark.colour}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(mark.label)}</text>'
        return f'<path class="ln da {mark.colour}" d="{d}"/>' + (label if mark.label else "")

    def _labels(self) -> str:
        """Labels at the right end of their marks, pushed apart where they would overlap."""
        labels: list[tuple[float, float, str, str]] = []
        for mark in self.panel.marks:
            if isinstance(mark, Line | Points) and mark.label:
                ends = [(vx, vy) for vx, vy in zip(mark.x, mark.y, strict=True) if math.isfinite(vx + vy)]
                if ends:
                    vx, vy = max(ends, key=lambda end: end[0])
                    x = self.width if self.panel.labels == "margin" else min(self.x.at(vx), self.width)
                    labels.append((max(6.0, min(self.height, self.y.at(vy))), x, mark.label, mark.colour))
        if self.panel.labels == "end":
            labels.sort(key=lambda item: item[0])
        else:  # in the order of the marks, about the middle of where they end
            middle = sum(item[0] for item in labels) / max(len(labels), 1)
            labels = [(middle - (len(labels) / 2 - i) * _LINE, *item[1:]) for i, item in enumerate(labels)]
        positions = push_apart([item[0] for item in labels], _LINE, 4.0, self.height - 6)  # above the ticks' labels
        return "".join(
            f'<text class="lb {colour}" x="{self.left + x + 8:.1f}" y="{_TOP + at + 4:.1f}">{escape(text)}</text>'
            for at, (_, x, text, colour) in zip(positions, labels, strict=True)
        )


def push_apart(positions: list[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted positions moved apart by at least `gap`, staying between low and high where that is possible."""
    moved = list(positions)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    if moved and moved[-1] > high:
        moved[-1] = high
        for i in range(len(moved) - 2, -1, -1):
            moved[i] = min(moved[i], moved[i + 1] - gap)
    if moved and moved[0] < low:
        moved = [at + low - moved[0] for at in moved]
    return moved


def _heat_map(panel: Panel, heat: Heat) -> str:
    left = 12 + max(_text_width(row) for row in heat.rows)
    head = 34 + max(_text_width(column) for column in heat.columns) * 0.72
    side = max(34.0, min(58.0, (WIDTH - left - 20) / len(heat.columns)))
    tall = 27.0
    head = min(head, 110.0)
    spill = _text_width(heat.columns[-1]) * 0.72  # the last column's slanted name leans to the right
    width = max(300.0, left + side * len(heat.columns) + max(10.0, spill - side / 2 + 8))
    height = head + tall * len(heat.rows) + 8
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" class="heat" aria-hidden="true" focusable="false" '
        f'style="max-width:{width * 1.15:.0f}px">',
        f'<text class="pt0" x="4" y="15">{escape(panel.title)}</text><g class="tk">',
    ]
    for j, column in enumerate(heat.columns):
        x = left + side * (j + 0.5)
        parts.append(f'<text transform="translate({x:.1f} {head - 6:.1f}) rotate(-42)">{escape(column)}</text>')
    for i, row in enumerate(heat.rows):
        y = head + tall * (i + 0.5) + 4
        parts.append(f'<text x="{left - 6:.1f}" y="{y:.1f}" text-anchor="end">{escape(row)}</text>')
    parts.append("</g>")
    for i in range(len(heat.rows)):
        for j in range(len(heat.columns)):
            value = heat.values[i][j]
            if value is None:
                continue
            cell, ink = correlation_colours(value, bool(heat.faded and heat.faded[i][j]))
            x, y = left + side * j, head + tall * i
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{side - 2:.1f}" height="{tall - 2:.1f}" rx="3" fill="{cell}" '
                f'data-t="{escape(heat.tips[i][j])}"/>'
                f'<text class="hv" x="{x + side / 2 - 1:.1f}" y="{y + tall / 2 + 3:.1f}" text-anchor="middle" '
                f'style="fill:{ink}">{_two_digits(value)}</text>'
            )
    return "".join(parts) + "</svg>"


def _two_digits(value: float) -> str:
    text = f"{abs(value):.2f}"
    text = text[1:] if text.startswith("0") else "1.0"
    return ("−" if value < 0 and text != ".00" else "") + text
