"""Initialisation and learning rate: the init axis, and the laws of each optimizer and start."""

from collections.abc import Mapping
from typing import Any

from habitus.reporting.figure import Exhibit, Line, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import (
    count,
    describe_optimum,
    join_words,
    power_of_ten,
    rate,
    sentence,
    significant,
    typeset_minus,
)
from habitus.reporting.runs import make_views
from habitus.reporting.study import Study
from habitus.store import LAW_NAMES, RateDrift, RunRow

_RATE = PlotAxis("learning rate", log=True, kind="rate")


def learning_rates(study: Study) -> Exhibit | None:
    """Loss against learning rate per size, and the best rate against size."""
    rows = [
        row for row in study.laws.runs if row.axis == "init" and "params" in row.knobs and "train/loss" in row.metrics
    ]
    if not rows:
        return None
    panels = [*_loss_panels(rows), *_drift_panels(study.laws.learning_rate_drift)]
    sheet = Sheet(
        ("init", "params", "learning_rate", "seed", "train/loss"),
        tuple((r.init, r.knobs["params"], r.learning_rate, r.seed, r.metrics["train/loss"]) for r in rows),
    )
    how = "Hollow: the best rate stands at the edge of its grid, so the true one may lie beyond."
    return Exhibit(
        "init",
        "Initialisation: loss against learning rate",
        (View(_describe_drifts(study), panels=tuple(panels)),),
        sheet,
        how,
    )


def _loss_panels(rows: list[RunRow]) -> list[Panel]:
    """Loss against learning rate, a panel per init and a line per size."""
    panels = []
    for init in sorted({row.init for row in rows}):
        marks: list[Mark] = []
        sizes = sorted({row.knobs["params"] for row in rows if row.init == init})
        for i, size in enumerate(sizes):
            same_size = [row for row in rows if row.init == init and row.knobs["params"] == size]
            same_size.sort(key=lambda row: row.learning_rate)
            xs, ys = [row.learning_rate for row in same_size], [row.metrics["train/loss"] for row in same_size]
            tips = [
                f"{init} · N {count(size)} · rate {rate(x)} · loss {significant(y)}"
                for x, y in zip(xs, ys, strict=True)
            ]
            colour = f"s{i % 8}"
            marks += [Line(xs, ys, colour, count(size)), Points(xs, ys, colour, tips)]
        panels.append(Panel(f"init = {init}", _RATE, PlotAxis("train/loss"), tuple(marks)))
    return panels


def _drift_panels(drifts: Mapping[str, RateDrift]) -> list[Panel]:
    """The best rate against size, a line per init; no panel where there is no drift."""
    marks: list[Mark] = []
    for i, (init, drift) in enumerate(drifts.items()):
        colour = f"s{i % 8}"
        xs, ys = [b.size for b in drift.best], [b.learning_rate for b in drift.best]
        marks.append(Line(xs, ys, colour, init))
        for bracketed in (True, False):
            rates = [b for b in drift.best if b.bracketed is bracketed]
            if rates:
                xs, ys = [b.size for b in rates], [b.learning_rate for b in rates]
                edge = "" if bracketed else ", at the edge of its grid"
                tips = [f"{init} · N {count(b.size)}: {rate(b.learning_rate)}{edge}" for b in rates]
                marks.append(Points(xs, ys, colour, tips, hollow=not bracketed, large=True))
    size_axis = PlotAxis("model size N", log=True, kind="count")
    return [Panel("best learning rate", size_axis, _RATE, tuple(marks))] if marks else []


def learning_rate_table(study: Study) -> Exhibit | None:
    drifts = study.laws.learning_rate_drift
    if not drifts:
        return None
    rows, raw = [], []
    spans = {"default": "default_span_decades", "mup_lr": "mup_span_decades"}  # the paper's MuP scales rates only
    for init, drift in drifts.items():
        printed = study.published.extra.get(spans.get(init, ""))
        for b in drift.best:
            rows.append(
                (
                    init,
                    count(b.size),
                    significant(b.loss),
                    rate(b.learning_rate) + ("" if b.bracketed else " (edge)"),
                    rate(b.vertex) if b.vertex else "–",
                    f"{drift.span_decades:.2f}",
                    f"{printed:.2f}" if isinstance(printed, float) else "–",
                )
            )
            raw.append(
                (init, b.size, b.loss, b.learning_rate, b.vertex, "yes" if b.bracketed else "no", drift.span_decades)
            )
    table = Table(
        ("init", "N", "best loss", "best rate", "vertex", "span, decades", "paper's span"),
        (*rows, *_loss_differences(drifts)),
    )
    sheet = Sheet(("init", "params", "best_loss", "best_rate", "vertex", "bracketed", "span_decades"), tuple(raw))
    return Exhibit(
        "init-table",
        "Initialisation: best loss and rate",
        (View(_describe_drifts(study), table=table),),
        sheet,
    )


def groups_table(study: Study) -> Exhibit | None:
    """Optima and exponents of each optimizer and init: runs of several are fitted apart."""
    laws = study.laws
    if not laws.groups:
        return None
    main = f"{laws.definitions['optimizer']}/{laws.definitions['init']}"
    entries_of = {main: laws.entries} | {group.name: group.entries for group in laws.groups}
    order = list(LAW_NAMES)
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        cells: dict[tuple[int, float], dict[str, str]] = {}  # by law and budget, then by group
        for group, entries in entries_of.items():
            for entry in entries:
                about = LAW_NAMES.get(entry.name)
                if about is None:
                    continue  # "share_fit" and the like say why an axis has no law
                value = "x_opt" if about.per_budget else "exponent"
                if entry.metric != metric or about.column is None or value not in entry.law.values:
                    continue
                kind = "percent" if about.percent else "count" if about.per_budget else "plain"
                row = cells.setdefault((order.index(entry.name), entry.budget or 0.0), {})
                row[group] = describe_optimum(entry.law, kind, value)
                raw.append((group, metric, entry.name, entry.budget, entry.law[value], entry.law.status))
        rows = []
        for (law, budget), row in sorted(cells.items()):
            about = LAW_NAMES[order[law]]
            title = about.title if about.per_budget else f"{about.title}, exponent"
            rows.append(
                (title, power_of_ten(budget) if budget else "–", *(row.get(group, "–") for group in entries_of))
            )
        reading = "Each column is fitted to the runs of one optimizer and start alone."
        return View(reading, metric, table=Table(("law", "budget", *entries_of), tuple(rows))) if rows else None

    views = make_views(study.metrics, view)
    if not views:
        return None
    sheet = Sheet(("group", "metric", "law", "flops_budget", "value", "status"), tuple(raw))
    how = "habitus fit --group takes the laws of another column as those that a plan asks."
    return Exhibit("groups", "Laws by optimizer and initialisation", views, sheet, how)


def _loss_differences(drifts: Mapping[str, RateDrift]) -> list[tuple[str, ...]]:
    """The default start's best loss less that of each other start, size by size; sizes are matched in order."""
    if "default" not in drifts:
        return []
    rows: list[tuple[str, ...]] = []
    for init, drift in drifts.items():
        if init == "default" or len(drift.best) != len(drifts["default"].best):
            continue
        for own, other in zip(drifts["default"].best, drift.best, strict=True):
            difference = typeset_minus(f"{own.loss - other.loss:+.3f}")
            rows.append((f"default − {init}", count(own.size), difference, "–", "–", "–", "–"))
    return rows


def _describe_drifts(study: Study) -> str:
    drifts = study.laws.learning_rate_drift
    if not drifts:
        return "One model size only: nothing can drift."
    spans = join_words(
        f"{d.span_decades:.2f} decades with init = {init}"
        + ("" if all(b.bracketed for b in d.best) else " (a lower bound: a best rate is at the edge of its grid)")
        for init, d in drifts.items()
    )
    best: dict[str, float] = {}
    for init, drift in drifts.items():
        best[init] = min(b.loss for b in drift.best)
    winner = min(best, key=lambda init: best[init])
    reading = f"over sizes the best learning rate spans {spans}"
    if len(best) > 1:
        reading += f"; the lowest training loss, {significant(best[winner])}, is with init = {winner}"
    budgets = sorted({row.budget for row in study.laws.runs if row.axis == "init"})
    return sentence(reading, f"measured at {join_words(power_of_ten(b) for b in budgets)}")
