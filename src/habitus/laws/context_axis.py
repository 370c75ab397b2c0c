"""Window lengths: the best one at each budget, L*(C), and the history beyond which a metric no longer gains.

Runs of the context axis are compared on one set of queries (`run_sources.on_same_queries`), so that a metric of theirs
is that of the longest history that the queries were shown.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from habitus.laws.axes import AxisLaws, _optima_and_law, axis_data
from habitus.laws.checks import sign_of
from habitus.laws.isoflop import isoflop_optimum
from habitus.laws.law_builders import law_without_values, make_intervals
from habitus.laws.pure_error import PureError, judge_fit
from habitus.laws.runs import MeasuredRun
from habitus.laws.two_term import two_term
from habitus.record import Record
from habitus.store import (
    AXES,
    BEYOND_SLICE,
    CONTEXT_SLICE,
    LEVELS,
    QUERY_SECONDS,
    TRAIN,
    Direction,
    Law,
    LawEntry,
    Residuals,
    direction_of,
)

TOLERANCE = 0.01  # of the metric with the longest history: what is lost below it is not worth a longer one
FORM = "the shortest history whose metric is within 1% of that with the longest, between two that were measured"
_TWO_TERM_POINTS = 10
_NORMAL = {0.80: 1.2816, 0.95: 1.96}


def fit_context(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """L* per budget and L*(C) over the interior ones; and what histories add, per budget."""
    if metric.startswith(f"{TRAIN}/"):
        return AxisLaws()  # other windows are other tasks
    data = axis_data(runs, AXES["context"].knob, metric)
    optima, gains = {}, []
    for c in np.unique(data.budget):
        at = data.budget == c
        optima[float(c)] = judge_fit(valley(data.x[at], data.y[at], direction_of(metric)), error)
        cell = _best_cell([run for run in data.runs if run.budget == c], metric)
        law = history_gain(cell, metric)
        gains.append(LawEntry(name="context_gain", axis="context", metric=metric, budget=float(c), law=law))
    return AxisLaws((*_optima_and_law("context", "context", metric, optima, data.note), *gains))


def valley(x: np.ndarray, y: np.ndarray, direction: Direction) -> Law:
    """A two-term valley where seeds leave points to judge its five values by; else a parabola in log x, of three."""
    return two_term(x, y, direction) if len(y) >= _TWO_TERM_POINTS else isoflop_optimum(x, y, direction)


def _best_cell(runs: Sequence[MeasuredRun], metric: str) -> list[MeasuredRun]:
    """The runs of the window length whose metric is best on average."""
    sign = sign_of(direction_of(metric))
    cells: dict[float, list[MeasuredRun]] = {}
    for run in runs:
        cells.setdefault(run.knobs["seq_len"], []).append(run)
    return min(cells.values(), key=lambda cell: sign * float(np.mean([run.metrics[metric] for run in cell])))


def history_gain(cell: Sequence[MeasuredRun], metric: str) -> Law:
    """The history that is enough for runs of one cell, with an interval over users, and the table behind it."""
    lengths = sorted(
        int(name.rpartition(CONTEXT_SLICE)[2])
        for name in cell[0].metrics
        if name.startswith(f"{metric}/{CONTEXT_SLICE}")
    )
    if len(lengths) < 2:
        return law_without_values("context_gain", FORM, "too_few", len(cell), "fewer than two history lengths")
    window = int(cell[0].knobs["seq_len"])
    lengths = sorted({*(n for n in lengths if n < window), min(n for n in lengths if n >= min(window, lengths[-1]))})
    rows = [_row(cell, metric, length, last=length == lengths[-1]) for length in lengths]
    best = abs(rows[-1]["value"]) or 1.0
    lost = np.array([row["lost"] for row in rows])
    spread = np.array([row["se"] for row in rows])
    x_opt = _enough(lengths, lost, TOLERANCE * best)
    by_level = {}
    for level in LEVELS:
        low, high = (_enough(lengths, lost + z * spread, TOLERANCE * best) for z in (-_NORMAL[level], _NORMAL[level]))
        by_level[level] = {"x_opt": (min(low, x_opt), max(high, x_opt))}
    warnings = []
    if lost[0] <= TOLERANCE * best:
        warnings.append(f"already {lengths[0]} events are within {TOLERANCE:.0%}: histories hardly matter here")
    elif lost[-2] > TOLERANCE * best:
        warnings.append(f"it still gains up to {min(lengths[-1], window)} events, the most that was tried or fits")
    return Law(
        law="context_gain",
        form=FORM,
        status="boundary" if warnings else "ok",
        values={"x_opt": x_opt, "y_opt": rows[-1]["value"]},
        intervals=make_intervals(by_level),
        residuals=Residuals(n=len(cell), dof=0),
        warnings=tuple(warnings),
        points={"history": tuple(map(float, lengths)), "metric": tuple(row["value"] for row in rows)},
        details={"seq_len": window, "tolerance": TOLERANCE, "rows": rows},
    )


def _row(cell: Sequence[MeasuredRun], metric: str, length: int, *, last: bool) -> dict[str, Any]:
    """The metric with so many events, what is lost to the longest history, and the time of one query."""
    sign = sign_of(direction_of(metric))
    beyond = f"{metric}/{BEYOND_SLICE}{length}"
    lost = [0.0 if last else -sign * run.metrics[beyond] for run in cell]
    errors = [0.0 if last else run.errors.get(beyond, 0.0) for run in cell]
    seconds = [run.metrics[name] for run in cell if (name := f"{QUERY_SECONDS}/{CONTEXT_SLICE}{length}") in run.metrics]
    return {
        "history": length,
        "value": float(np.mean([run.metrics[f"{metric}/{CONTEXT_SLICE}{length}"] for run in cell])),
        "lost": float(np.mean(lost)),
        "se": float(np.mean(errors)),  # seeds answer the same queries, so that they do not average users out
        "seconds": float(np.median(seconds)) if seconds else None,
    }


def _enough(lengths: Sequence[int], lost: np.ndarray, allowed: float) -> float:
    """Where the loss falls to what is allowed for good, between two lengths on a logarithmic scale."""
    above = np.flatnonzero(lost > allowed)
    if not len(above):
        return float(lengths[0])
    place = int(above[-1])
    if place == len(lengths) - 1:
        return float(lengths[-1])
    first, second = np.log(lengths[place]), np.log(lengths[place + 1])
    share = (lost[place] - allowed) / (lost[place] - lost[place + 1])
    return float(np.exp(first + share * (second - first)))


def history_of_record(record: Record, metric: str) -> Law | None:
    """The history that is enough for one run, where its Record says what shorter ones lose."""
    if not any(name.startswith(f"{metric}/{CONTEXT_SLICE}") for name in record.metrics):
        return None
    values = {name: measured.value for name, measured in record.metrics.items()} | dict(record.throughput)
    errors = {name: measured.se for name, measured in record.metrics.items() if measured.se is not None}
    knobs = {"seq_len": float(record.recipe.data.seq_len)}
    run = MeasuredRun("context", "", 0.0, 0.0, record.seed, knobs=knobs, metrics=values, errors=errors)
    return history_gain([run], metric)


def served_history(law: Law) -> int | None:
    """The shortest history among those measured that is enough; None where only the longest is."""
    rows = law.details.get("rows", [])
    lengths = [row["history"] for row in rows[:-1] if row["history"] >= law["x_opt"] - 1e-9] if law.values else []
    return min(lengths, default=None)


def describe_history(law: Law, metric: str) -> str:
    """'train with 512, serve with 200: -0.3% recall@10 at 0.34 of the time of a query', of lengths as measured."""
    if not law.values:
        return ""
    rows, served = law.details["rows"], served_history(law)
    bare, longest = metric.rpartition("/")[2], rows[-1]
    if served is None:
        return f"train with {law.details['seq_len']}, serve with all of it: shorter histories lose more than 1% {bare}"
    row = next(row for row in rows if row["history"] == served)
    change = (row["value"] - longest["value"]) / (abs(longest["value"]) or 1.0)
    text = f"train with {law.details['seq_len']}, serve with {served}: {change:+.1%} {bare}"
    if row["seconds"] and longest["seconds"]:
        text += f" at {row['seconds'] / longest['seconds']:.2f} of the time of a query"
    return text
