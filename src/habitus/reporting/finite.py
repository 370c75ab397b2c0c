"""A log that ends before the compute does: passes, regularisation, what more users would bring, and test users."""

from collections.abc import Sequence
from typing import Any

from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import (
    count,
    format_number,
    join_words,
    power_of_ten,
    pretty,
    reason,
    sentence,
    significant,
)
from habitus.reporting.runs import best_row, better, make_views, run_line, run_points, run_sheet, values_of_runs
from habitus.reporting.study import Study
from habitus.store import LOG_AXIS, TABLE_METRICS, Estimate, RunRow, direction_of

_REGULARISERS = {
    "dropout": "dropout", "token_dropout": "dropout of text tokens", "field_dropout": "dropout of item fields",
    "item_dropout": "dropout of item vectors", "weight_decay": "weight decay",
}  # fmt: skip
_KNOBS = ("epochs", *_REGULARISERS, "params", "slots_seen", "unique_events", "user_share", "user_part")
_HELPS = {"yes": "helps", "no": "does not help", "undecided": "may help or harm"}


def passes(study: Study) -> Exhibit | None:
    """Metrics against passes over the log, a line per size."""

    def view(metric: str) -> View | None:
        rows = _whole_log(study, metric)
        if len({row.knobs["epochs"] for row in rows}) < 2:
            return None
        axis = PlotAxis("passes over the training events", log=True, kind="count")
        best = best_row(rows, metric)
        reading = (
            f"the best run for {metric}, {significant(best.metrics[metric])}, took "
            f"{significant(best.knobs['epochs'], 3)} passes with N = {count(best.knobs['params'])}"
        )
        limits = study.log_limits(metric)
        by_law = (
            f"by the law of this log {_estimate(limits.best_passes, 3)} passes are best" if limits.best_passes else ""
        )
        panel = Panel(better(metric), axis, PlotAxis(metric), tuple(_lines_by_size(study, rows, "epochs", metric)))
        return View(sentence(reading, by_law), metric, (panel,))

    how = "A dot per run on the whole log, a line per size through the best run at each number of passes."
    return _exhibit(study, "passes", "Metrics against passes", view, how)


def regularisation(study: Study) -> Exhibit | None:
    """Metrics against every kind of regularisation that was varied, a line per size."""

    def view(metric: str) -> View | None:
        panels, clauses = [], []
        for knob, label in _REGULARISERS.items():
            rows = [row for row in _whole_log(study, metric) if knob in row.knobs]
            values = sorted({row.knobs[knob] for row in rows})
            if len(values) < 2:
                continue
            panels.append(
                Panel(label, PlotAxis(label), PlotAxis(metric), tuple(_lines_by_size(study, rows, knob, metric)))
            )
            best = best_row(rows, metric)
            least = best_row([row for row in rows if row.knobs[knob] == values[0]], metric)
            clauses.append(
                f"with {label} {best.knobs[knob]:g} the best run has {metric} {significant(best.metrics[metric])}, "
                f"with {values[0]:g} {significant(least.metrics[metric])}"
            )
        return View(sentence(*clauses), metric, tuple(panels)) if panels else None

    how = "A dot per run on the whole log; a line per size joins the best run at each value, whatever its other knobs."
    return _exhibit(study, "regularisation", "Metrics against regularisation", view, how)


def value_of_data(study: Study) -> Exhibit | None:
    """The metric against unique events: runs on shares of the users, and what more users are expected to bring."""

    def view(metric: str) -> View | None:
        rows = study.best_rate_runs(LOG_AXIS, needs=["unique_events", metric])
        limits = study.log_limits(metric)
        if len({row.knobs["unique_events"] for row in rows}) < 2 and not limits.more_users:
            return None
        marks: list[Mark] = _best_line(rows, "unique_events", metric, "main", "best run") if rows else []
        marks += [run_points(study, rows, "unique_events", metric, metric, colour="muted")] if rows else []
        clauses = []
        if limits.more_users:
            more = limits.more_users
            tips = [f"with {m.factor:g} times the users: {_estimate(m.value)}" for m in more]
            ends = [(_end(m.value.low, -1), _end(m.value.high, 1)) for m in more]
            marks.append(
                Points(
                    [m.events for m in more], [m.value.value for m in more], "plan", tips, [low for low, _ in ends],
                    [high for _, high in ends], hollow=True, large=True, label="forecast",
                )
            )  # fmt: skip
            clauses += [f"with {_times(m.factor)} the users: {metric} {_estimate(m.value)}" for m in more]
            if not any(m.checked for m in more):
                clauses.append("no run has checked what lies beyond the log")
        elif limits.notes:
            clauses.append(f"what more users would bring is not identified for {metric}: {pretty(limits.notes[0])}")
        axis = PlotAxis("unique training events", log=True, kind="count")
        return View(sentence(*clauses), metric, (Panel(better(metric), axis, PlotAxis(metric), tuple(marks)),))

    how = "Grey dots are runs on parts of the users, the line joins the best of each part; hollow: forecasts with 95%."
    return _exhibit(study, "value-of-data", "The value of more data", view, how)


def limits_table(study: Study) -> Exhibit | None:
    """What the law of a finite log answers, per metric."""
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        law = study.law("finite_log", metric)
        if law is None:
            return None
        limits = study.log_limits(metric)
        rows = [
            (name, _estimate(value, 3, kind))
            for name, value, kind in (
                ("best value on this log", limits.best_value, "plain"), ("best size N", limits.best_size, "count"),
                ("best number of passes", limits.best_passes, "plain"),
                ("compute beyond which this log buys nothing", limits.compute_limit, "flops"),
            )
            if value is not None
        ]  # fmt: skip
        rows += [(step.what, f"{_HELPS[step.helps]}: {_estimate(step.change, 2)}") for step in limits.steps]
        rows += [(f"{_times(m.factor)} the users", _estimate(m.value)) for m in limits.more_users]
        raw.extend((metric, *row) for row in rows)
        clauses = [
            f"from the best run for {metric}, " + join_words(f"{s.what} {_HELPS[s.helps]}" for s in limits.steps)
        ]
        if limits.compute_limit is not None:
            clauses.append(f"beyond {power_of_ten(limits.compute_limit.value)} FLOPs this log buys nothing")
        if not limits.steps:
            clauses = [f"not identified for {metric}: {reason(law)}"]
        notes = [pretty(note) for note in limits.notes] + ([f"The law: {limits.form}."] if limits.form else [])
        table = Table(("question", f"answer for {metric} [95%]"), tuple(rows), tuple(notes))
        return View(sentence(*clauses), metric, table=table)

    views = make_views(study.metrics, view)
    sheet = Sheet(("metric", "question", "answer"), tuple(raw))
    return Exhibit("log-limits", "How far this log goes", views, sheet) if any(v.table for v in views) else None


def table_of_test_users(study: Study) -> Exhibit | None:
    """The model and the baselines on users that chose nothing."""
    table = study.test_table
    names = [] if table is None else [name for name in TABLE_METRICS if name in table.rows[0].metrics]
    if table is None or not names:
        return None
    rows, raw = [], []
    for row in table.rows:
        cells = []
        for name in names:
            metric, difference = row.metrics.get(name), row.differences.get(name)
            value = None if metric is None else metric.value
            cells.append(significant(value) + (f"\n{difference}".replace("-", "−") if difference else ""))
            ends = (difference.value, difference.low, difference.high) if difference else (None, None, None)
            raw.append((row.scorer, name, value, *ends))
        rows.append((row.scorer, *cells))
    first = table.rows[0]
    name = names[0]
    rivals = [row for row in table.rows[1:] if name in row.metrics and row.scorer != "oracle"]  # which nothing beats
    clauses = [f"on {table.queries:,} queries of {table.users:,} {table.side} users {first.scorer} has {name} "
               f"{significant(first.metrics[name].value)}"]  # fmt: skip
    if rivals:
        best = (max if direction_of(f"catalogue/{name}") == "max" else min)(rivals, key=lambda r: r.metrics[name].value)
        difference = best.differences.get(name)
        by = f", a difference of {difference}".replace("-", "−") if difference else ""
        clauses.append(f"the best baseline, {best.scorer}, has {significant(best.metrics[name].value)}{by}")
    header = ("scorer", *names)
    sheet = Sheet(("scorer", "metric", "value", "difference", "low95", "high95"), tuple(raw))
    view = View(
        sentence(*clauses),
        table=Table(
            header, tuple(rows), ("Below a value: the model less that scorer on the same queries, 95% over users.",)
        ),
    )
    return Exhibit("test-users", f"On {table.side} users", (view,), sheet)


def _exhibit(study: Study, key: str, title: str, view: Any, how: str) -> Exhibit | None:
    metrics = study.fitted_metrics(LOG_AXIS)
    views = make_views(metrics, view)
    sheet = run_sheet(study.best_rate_runs(LOG_AXIS), metrics, _KNOBS)
    return Exhibit(key, title, views, sheet, how) if views else None


def _whole_log(study: Study, metric: str) -> list[RunRow]:
    """Runs of stage 1 on all training users."""
    rows = study.best_rate_runs(LOG_AXIS, needs=["epochs", "params", metric])
    return [row for row in rows if row.knobs.get("user_share", 1.0) == 1.0 and not row.knobs.get("num_negatives")]


def _lines_by_size(study: Study, rows: Sequence[RunRow], knob: str, metric: str) -> list[Mark]:
    marks: list[Mark] = []
    for i, size in enumerate(sorted({row.knobs["params"] for row in rows})):
        group = [row for row in rows if row.knobs["params"] == size]
        colour = f"s{i % 8}"
        marks += [
            *_best_line(group, knob, metric, colour, count(size)),
            run_points(study, group, knob, metric, metric, colour=colour),
        ]
    return marks


def _best_line(rows: Sequence[RunRow], knob: str, metric: str, colour: str, label: str) -> list[Mark]:
    """A line through the best run at every value of a knob; passes that differ by a step are the same."""
    at: dict[str, list[RunRow]] = {}
    for row in rows:
        at.setdefault(f"{row.knobs[knob]:.2g}", []).append(row)
    best = [best_row(group, metric) for group in at.values()]
    return [run_line(values_of_runs(best, knob), values_of_runs(best, metric), colour, label)]


def _end(value: float | None, sign: int) -> float:
    return sign * float("inf") if value is None else value


def _estimate(estimate: Estimate, digits: int = 4, kind: str = "plain") -> str:
    def form(value: float | None) -> str:
        if value is None:
            return "open"
        return significant(value, digits) if kind == "plain" else format_number(value, kind)

    return f"{form(estimate.value)} [{form(estimate.low)}, {form(estimate.high)}]"


def _times(factor: float) -> str:
    return {2.0: "twice", 4.0: "four times", 10.0: "ten times"}.get(factor, f"{factor:g} times")
