"""Fitted laws in Python: looked up by name and metric, as a data frame, as a figure."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from habitus.display import html_table
from habitus.errors import ConfigError
from habitus.laws import format_summary, predict_power_law, predict_saturating
from habitus.store import Law, LawEntry
from habitus.store import Laws as StoredLaws

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LABELS = {"power_law": ("budget C (FLOPs)", "optimum"), "saturating": ("budget C (FLOPs)", "metric")}


class FittedLaw(LawEntry):
    """One law with its name and metric; `law.law` holds values and intervals."""

    def __getitem__(self, name: str) -> Any:
        return self.law[name]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The fitted points and, where the law has one, its curve with the 95% band."""
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.figure(figsize=(5.5, 3.6), layout="constrained").add_subplot()
        x, y = _columns(self.law)
        ax.plot(x, y, "o", label="runs")
        predict = _PREDICTIONS.get(self.law.law)
        if predict is not None and self.law.values:
            grid = np.geomspace(min(x), max(x), 60)
            values, low, high = np.array([predict(self.law, float(at)) for at in grid]).T
            ax.plot(grid, values, label=self.law.form)
            ax.fill_between(grid, low, high, where=np.isfinite(low) & np.isfinite(high), alpha=0.2, label="95%")
        elif "x_opt" in self.law.values:
            low, high = self.law.interval("x_opt")
            ax.axvline(self.law["x_opt"], linestyle="--", label="optimum")
            if np.isfinite(low) and np.isfinite(high):
                ax.axvspan(low, high, alpha=0.2, label="95%")
        ax.set_xscale("log")
        x_label, y_label = _LABELS.get(self.law.law, (self.axis, self.metric))
        budget = "" if self.budget is None else f" at {self.budget:.3g} FLOPs"
        ax.set(xlabel=x_label, ylabel=y_label, title=f"{self.name}, {self.metric}{budget}: {self.law.status}")
        ax.legend()
        return ax

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f" at {self.budget:.3g} FLOPs"
        values = ", ".join(f"{name} = {_format_value(self.law, name)}" for name in self.law.values)
        return f"{self.name} of {self.metric}{budget}: {self.law.status}" + (f", {values}" if values else "")

    __str__ = __repr__


class Laws(StoredLaws):
    """Everything that `habitus fit` gives. `laws["size_law", "batch/loss"]` is one law of it."""

    @classmethod
    def of(cls, laws: StoredLaws) -> "Laws":
        """The same laws with lookup, frame and figures."""
        return cls.model_validate({name: getattr(laws, name) for name in StoredLaws.model_fields})

    def __getitem__(self, key: str | tuple[str, str] | tuple[str, str, float]) -> FittedLaw:
        """The law of a name, a metric (the first fitted one by default) and, for optima, a budget (the largest)."""
        parts: tuple[Any, ...] = (key,) if isinstance(key, str) else key
        name = str(parts[0])
        metric = str(parts[1]) if len(parts) > 1 else next((e.metric for e in self.entries if e.name == name), "")
        entries = [e for e in self.entries if (e.name, e.metric) == (name, metric)]
        budget = float(parts[2]) if len(parts) > 2 else max((e.budget for e in entries if e.budget), default=None)
        self.find(name, metric, budget)  # says what there is, where this is not
        entry = next(e for e in entries if e.budget == budget)
        return FittedLaw(**{field: getattr(entry, field) for field in LawEntry.model_fields})

    def to_frame(self) -> "pd.DataFrame":
        """A row per value of a law, with its 95% interval, as a pandas data frame."""
        try:
            import pandas as pd
        except ImportError:
            raise ConfigError("pandas is not installed", next_step="pip install pandas") from None
        return pd.DataFrame(self._rows(), columns=list(_COLUMNS))

    def __repr__(self) -> str:
        return format_summary(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        rows = [[_format_cell(cell) for cell in row] for row in self._rows()]
        return html_table(f"Laws of {self.source}", rows, header=_COLUMNS)

    def _rows(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for entry in self.entries:
            start = (entry.name, entry.metric, entry.budget, entry.law.status)
            scalars = {name: value for name, value in entry.law.values.items() if isinstance(value, float | int)}
            for name, value in scalars.items():
                rows.append((*start, name, value, *entry.law.interval(name)))
            if not scalars:
                rows.append((*start, None, None, None, None))
        return rows


_COLUMNS = ("law", "metric", "budget", "status", "value_name", "value", "low", "high")
_PREDICTIONS: dict[str, Callable[[Law, float], tuple[float, float, float]]] = {
    "power_law": predict_power_law,
    "saturating": predict_saturating,
}


def _columns(law: Law) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The two columns to draw; laws name theirs x and y, or by their letters."""
    if "x" in law.points and "y" in law.points:
        return law.points["x"], law.points["y"]
    columns = list(law.points.values())
    if len(columns) < 2:
        raise ConfigError(f"{law.law} with status {law.status!r} holds no points", expected="a law that was fitted")
    return columns[0], columns[-1]


def _format_value(law: Law, name: str) -> str:
    low, high = law.interval(name)
    interval = f" [{low:.3g}, {high:.3g}]" if np.isfinite(low) or np.isfinite(high) else ""
    value = law.values[name]
    return f"{value:.4g}{interval}" if isinstance(value, float | int) else str(value)


def _format_cell(cell: Any) -> str:
    if cell is None or (isinstance(cell, float) and not np.isfinite(cell)):
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
