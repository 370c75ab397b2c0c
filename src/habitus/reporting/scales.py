"""From values to pixels along an axis, and where its ticks stand."""

import math
from collections.abc import Iterable

from habitus.reporting.figure import Band, Line, Mark, PlotAxis, Points, Rule
from habitus.reporting.format import count, power_of_ten, significant


class Scale:
    """A linear or logarithmic map of [low, high] onto [start, end] in pixels."""

    def __init__(self, axis: PlotAxis, values: Iterable[float], start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        drawable = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
        if axis.zero_at is not None:
            drawable.append(axis.zero_at)
        low = min(drawable, default=1.0) if axis.low is None else axis.low
        high = max(drawable, default=10.0) if axis.high is None else axis.high
        self.low, self.high = self._pad(low, high)

    def _pad(self, low: float, high: float) -> tuple[float, float]:
        axis = self.axis
        if axis.log:
            if high / low < 1.2:
                low, high = low / 1.3, high * 1.3
            margin = (high / low) ** 0.05
            return (low / margin if axis.low is None else low), (high * margin if axis.high is None else high)
        if high - low < 1e-12 * max(abs(high), 1e-300):
            low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        margin = 0.06 * (high - low)
        return (low - margin if axis.low is None else low), (high + margin if axis.high is None else high)

    def at(self, value: float) -> float:
        """The pixel of a value; values far outside are clamped near the edge."""
        if self.axis.log:
            if value <= 0:
                value = self.axis.zero_at or self.low
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + max(-2.0, min(3.0, share)) * (self.end - self.start)

    def contains(self, value: float) -> bool:
        return math.isfinite(value) and (self.low <= value <= self.high or (value == 0 and self.axis.log))

    def ticks(self) -> list[tuple[float, str]]:
        """Values and labels of the ticks."""
        if self.axis.tick_names:
            return list(zip(self.axis.ticks, self.axis.tick_names, strict=True))
        if self.axis.ticks:
            form = power_of_ten if self.axis.kind == "flops" else "{:g}".format
            return [(t, form(t).replace("-", "−")) for t in self.axis.ticks if self.contains(t)]
        values = self._log_ticks() if self.axis.log else self._linear_ticks()
        ticks = [(value, self._label(value, values)) for value in values]
        if self.axis.zero_at is not None:
            ticks.insert(0, (0.0, "0"))
        return ticks

    def _log_ticks(self) -> list[float]:
        low, high = self.low * 0.9999, self.high * 1.0001
        if self.axis.zero_at is not None:
            low = self.axis.zero_at * 1.5
        decades = math.log10(high / low)
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps: tuple[float, ...] = (1,)
        if decades < 1.2:
            steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.7 else (1, 2, 3, 5)
        elif self.axis.kind == "flops":
            steps = (1, 3) if decades < 2.4 else (1,)
        elif decades < 3.3:
            steps = (1, 2, 5) if decades < 2.4 else (1, 3)
        ticks = [s * 10.0**e for e in range(first, last + 1) for s in steps if low <= s * 10.0**e <= high]
        while len(ticks) > 8:
            ticks = ticks[::2]
        return ticks if len(ticks) >= 2 else [t for t in self._linear_ticks() if t > 0]

    def _linear_ticks(self) -> list[float]:
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = min((unit * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _label(self, value: float, values: list[float]) -> str:
        kind = self.axis.kind
        if kind in ("flops", "rate"):
            return power_of_ten(value)
        if kind == "count":
            return count(value)
        if kind == "percent":
            return f"{100 * value:.3g}%".replace("-", "−")
        if self.axis.log:
            return significant(value, 2) if value < 1e4 else count(value)
        step = abs(values[1] - values[0]) if len(values) > 1 else abs(value) or 1.0
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        while places < 8 and abs(step * 10**places - round(step * 10**places)) > 1e-6:
            places += 1
        return f"{value + 0.0:.{min(places, 8)}f}".replace("-", "−")


_BAR_FACTOR = 3.0  # how far an error bar stretches a logarithmic axis: enough to see that it is wide


def values_of(marks: Iterable[Mark], which: str, log: bool = False) -> list[float]:
    """All x or all y of the marks, so that an axis can hold them, and along y the bars as well.

    A bar stretches a logarithmic axis up to a factor, and a linear one by no more than what the marks span without it.
    Bands stretch an axis where they are to be seen whole.
    """
    marks, values = list(marks), list[float]()
    seen = [y for mark in marks if isinstance(mark, Points | Line) for y in mark.y if math.isfinite(y)]
    span = max(seen, default=0.0) - min(seen, default=0.0)
    for mark in marks:
        if isinstance(mark, Points | Line):
            values += list(mark.x if which == "x" else mark.y)
        if which == "y" and isinstance(mark, Points) and mark.bars == "y":
            for y, low, high in zip(mark.y, mark.low, mark.high, strict=False):
                least, most = (y / _BAR_FACTOR, y * _BAR_FACTOR) if log else (y - span, y + span)
                values += [max(low, least), min(high, most)]
        if isinstance(mark, Band) and which == "x":
            values += list(mark.x)
        if isinstance(mark, Band) and which == "y" and mark.whole:
            values += [*mark.low, *mark.high]
        if isinstance(mark, Rule) and mark.along == which:
            values.append(mark.at)
    return values
