"""Do metrics rank the runs alike, and do short and long histories? Spearman's ρ by stage, budget and slice."""

from collections.abc import Sequence
from typing import Any

from habitus.reporting.figure import Exhibit, Heat, Line, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import power_of_ten, sentence, typeset_minus
from habitus.reporting.runs import make_views
from habitus.reporting.study import Study
from habitus.reporting.valleys import compute_axis
from habitus.store import CORRELATED_REGIMES, REGIMES, CorrelationStage, CorrelationTable, NamedTables

_BEST_RATE = "best learning rate only"


def stage_title(stage: CorrelationStage) -> str:
    return f"stage {stage[-1]}, {CORRELATED_REGIMES[stage]} regime"


def bare(metric: str) -> str:
    """The metric without its regime."""
    return metric.split("/", 1)[1] if "/" in metric else metric


def tables_of(study: Study, name: str, runs: str = _BEST_RATE) -> tuple[CorrelationTable, ...]:
    for named in study.laws.correlations:
        if named.name == name and named.runs == runs:
            return named.tables
    return ()


def matrix(table: CorrelationTable, title: str) -> Panel:
    """A correlation table as a heat map: the lower triangle."""
    names = sorted(table.names, key=_length) if "all" in table.names else list(table.names)
    rows, columns = names[1:], names[:-1]
    pairs = {frozenset((p.first, p.second)): p for p in table.pairs}
    values, tips = [], []
    for i, row in enumerate(rows):
        line: list[float | None] = []
        line_tips = []
        for j, column in enumerate(columns):
            pair = pairs.get(frozenset((row, column))) if j <= i else None
            line.append(None if pair is None else pair.rho)
            if pair is None or pair.rho is None:
                line_tips.append("")
            else:
                chance = "" if pair.beyond_chance else ", within chance"
                line_tips.append(f"{bare(column)} and {bare(row)}: ρ = {pair.rho:+.2f}, n = {pair.n}{chance}")
        values.append(tuple(line))
        tips.append(tuple(line_tips))
    return Panel(
        title, heat=Heat(tuple(_short(r) for r in rows), tuple(_short(c) for c in columns), tuple(values), tuple(tips))
    )


def _short(name: str) -> str:
    return bare(name).removeprefix("history=")


def _length(name: str) -> float:
    """The history length of a slice, 'all' last."""
    digits = name.rpartition("=")[2]
    return float(digits) if digits.isdigit() else float("inf")


def correlation_matrices(study: Study) -> Exhibit | None:
    """Stage 1 and stage 2 matrices over all budgets."""
    panels, clauses = [], []
    for stage in CORRELATED_REGIMES:
        where = stage_title(stage)
        tables = tables_of(study, stage)
        pooled = next((t for t in tables if t.label == "pooled"), None)
        if pooled is None:
            continue
        panels.append(matrix(pooled, f"{where}, pooled, n = {pooled.num_rows}"))
        clauses.append(_describe_extremes(pooled, where))
    if not panels:
        return None
    sheet = _pair_sheet([n for n in study.laws.correlations if n.name in CORRELATED_REGIMES], "pooled")
    how = (
        "Spearman's ρ. Losses fall where ranking metrics rise, so −1 is agreement between a loss and a ranking metric."
    )
    return Exhibit(
        "correlations", "Correlation of metrics", (View(sentence(*clauses), panels=tuple(panels)),), sheet, how
    )


def correlation_by_budget(study: Study) -> Exhibit | None:
    """ρ of the loss with every other metric, budget by budget."""
    panels, clauses = [], []
    raw: list[tuple[Any, ...]] = []
    for stage, regime in CORRELATED_REGIMES.items():
        where = stage_title(stage)
        tables = [t for t in tables_of(study, stage) if t.label != "pooled"]
        if not tables:
            continue
        loss = f"{regime}/loss"
        others = [n for n in tables[0].names if n != loss]
        if loss not in tables[0].names:
            continue
        marks: list[Mark] = []
        for i, other in enumerate(others):
            points = [
                (float(t.label), rho, t.num_rows)
                for t in tables
                if other in t.names and (rho := t.rho(loss, other)) is not None
            ]
            if points:
                xs, ys = [b for b, _, _ in points], [r for _, r, _ in points]
                tips = [f"{power_of_ten(b)}: loss and {bare(other)} ρ = {r:+.2f}, n = {n}" for b, r, n in points]
                colour = f"s{i % 8}"
                marks += [Line(xs, ys, colour, bare(other)), Points(xs, ys, colour, tips)]
                raw += [(stage, b, other, n, r) for b, r, n in points]
        if marks:
            panels.append(
                Panel(
                    where,
                    compute_axis(study),
                    PlotAxis("ρ with the loss", low=-1.08, high=1.08, ticks=(-1, -0.5, 0, 0.5, 1)),
                    tuple(marks),
                )
            )
            clauses.append(_describe_widest_range(tables, loss, others, where))
    if not panels:
        return None
    sheet = Sheet(("set", "flops_budget", "metric", "n", "rho"), tuple(raw))
    return Exhibit(
        "correlations-budget", "Correlation with the loss by budget",
        (View(sentence(*clauses), panels=tuple(panels)),), sheet,
        "Within a budget, where compute does not help every metric at once.",
    )  # fmt: skip


def correlation_tables(study: Study) -> list[Exhibit]:
    """The same as tables, with n, for the best rate only and for all evaluations, and every budget's whole matrix."""
    exhibits = []
    for stage, regime in CORRELATED_REGIMES.items():
        where = stage_title(stage)
        named = [n for n in study.laws.correlations if n.name == stage]
        if not named:
            continue
        loss = f"{regime}/loss"
        others = [m for m in named[0].tables[0].names if m != loss]
        rows = []
        for group in named:
            for table in group.tables:
                if loss not in table.names or (group is not named[0] and table in named[0].tables):
                    continue  # with one learning rate per cell, all evaluations are those of the best rate
                cells = [table.rho(loss, m) for m in others]
                label = table.label if table.label == "pooled" else power_of_ten(float(table.label))
                rows.append(
                    (
                        label,
                        group.runs,
                        str(table.num_rows),
                        *("–" if c is None else f"{c:+.2f}".replace("-", "−") for c in cells),
                    )
                )
        if not rows:
            continue
        header = ("budget", "runs", "n", *(f"ρ(loss, {bare(m)})" for m in others))
        reading = sentence(_describe_extremes(named[0].tables[-1], where))
        matrices = tuple(
            matrix(table, f"{where} at {power_of_ten(float(table.label))}, n = {table.num_rows}")
            for table in tables_of(study, stage)
            if table.label != "pooled" and len(table.names) > 1
        )
        view = View(reading, panels=matrices, table=Table(header, tuple(rows)))
        exhibits.append(Exhibit(f"correlations-{stage}", f"Correlations, {where}", (view,), _pair_sheet(named)))
    return exhibits


def _pair_sheet(named: Sequence[NamedTables], only: str = "") -> Sheet:
    """One line per pair of columns; `only` keeps the tables of that label."""
    raw = [
        (n.name, n.runs, t.label, p.first, p.second, p.n, p.rho, p.chance_low, p.chance_high)
        for n in named
        for t in n.tables
        for p in t.pairs
        if only in ("", t.label)
    ]
    return Sheet(("set", "runs", "budget", "first", "second", "n", "rho", "chance_low", "chance_high"), tuple(raw))


def _describe_extremes(table: CorrelationTable, where: str) -> str:
    """The pairs of a table that agree least and most, in absolute value."""
    pairs = [p for p in table.pairs if p.rho is not None]
    if not pairs:
        return f"{where}: no pair could be correlated"
    if len(pairs) == 1:
        (p,) = pairs
        return typeset_minus(
            f"{where} ({table.label}): ρ of {bare(p.first)} and {bare(p.second)} is {p.rho:+.2f}, n = {p.n}"
        )
    low = min(pairs, key=lambda p: abs(p.rho or 0.0))
    high = max(pairs, key=lambda p: abs(p.rho or 0.0))
    return (
        f"{where} ({table.label}): {bare(low.first)} and {bare(low.second)} agree least "
        f"(ρ = {low.rho:+.2f}, n = {low.n}), "
        f"{bare(high.first)} and {bare(high.second)} most ({high.rho:+.2f})"
    ).replace("-0.", "−0.").replace("-1.", "−1.")  # fmt: skip


def _describe_widest_range(tables: Sequence[CorrelationTable], loss: str, others: Sequence[str], where: str) -> str:
    ranges = {}
    for other in others:
        rhos = [r for t in tables if other in t.names and (r := t.rho(loss, other)) is not None]
        if rhos:
            ranges[other] = (min(rhos), max(rhos))
    if not ranges:
        return f"{where}: nothing could be correlated"
    worst = max(ranges, key=lambda m: ranges[m][1] - ranges[m][0])
    low, high = ranges[worst]
    reading = (
        f"{where}: the loss's correlation changes most over budgets for {bare(worst)}, from {low:+.2f} to {high:+.2f}"
    )
    return reading.replace("-0.", "−0.").replace("-1.", "−1.")


def worst_agreement(study: Study) -> Exhibit | None:
    """The lowest ρ between any two slices, against compute."""
    panels, clauses = [], []
    raw: list[tuple[Any, ...]] = []
    for regime in REGIMES:
        marks: list[Mark] = []
        lowest: list[tuple[float, str, float, str]] = []
        for i, metric in enumerate(_sliced_metrics(study, regime)):
            points = []
            for table in tables_of(study, f"slices:{metric}"):
                worst = table.worst()
                if worst is not None and worst.rho is not None:
                    points.append((float(table.label), worst.rho, f"{worst.first} and {worst.second}", worst.n))
            if points:
                colour = f"s{i % 8}"
                xs, ys = [p[0] for p in points], [p[1] for p in points]
                tips = [
                    f"{metric} at {power_of_ten(b)}: {pair} agree least, ρ = {r:+.2f}, n = {n}"
                    for b, r, pair, n in points
                ]
                marks += [Line(xs, ys, colour, bare(metric)), Points(xs, ys, colour, tips)]
                raw += [(metric, b, pair, n, r) for b, r, pair, n in points]
                lowest += [(r, metric, b, pair) for b, r, pair, _ in points]
        if marks:
            axis = PlotAxis("worst ρ between slices", high=1.01)
            panels.append(Panel(f"{regime} regime", compute_axis(study), axis, tuple(marks)))
            r, metric, b, pair = min(lowest)
            clauses.append(f"{regime}: the slices agree least for {metric} at {power_of_ten(b)} ({pair}, ρ = {r:+.2f})")
    if not panels:
        return None
    sheet = Sheet(("metric", "flops_budget", "pair", "n", "rho"), tuple(raw))
    reading = sentence(*clauses).replace("= -", "= −")
    how = "A value near 1: whichever history length is looked at, the same cells win."
    return Exhibit("slices", "Worst agreement of history slices", (View(reading, panels=tuple(panels)),), sheet, how)


def slice_matrices(study: Study, regime: str) -> Exhibit | None:
    """One matrix per budget for each metric of a regime."""

    def view(metric: str) -> View | None:
        tables = tables_of(study, f"slices:{metric}")
        panels = tuple(
            matrix(table, f"{metric} at {power_of_ten(float(table.label))}, n = {table.num_rows}")
            for table in tables
            if len(table.names) > 1
        )
        worst = [w for w in (t.worst() for t in tables) if w is not None and w.rho is not None]
        if not panels or not worst:
            return None
        low = min(worst, key=lambda w: w.rho or 0.0)
        pair = f"{low.first} and {low.second}"
        reading = f"for {metric} the slices {pair} agree least over all budgets: ρ = {low.rho:+.2f}, n = {low.n}"
        return View(sentence(reading).replace("= -", "= −"), metric, panels)

    views = make_views(_sliced_metrics(study, regime), view)
    sheet = _pair_sheet(
        [n for n in study.laws.correlations if n.runs == _BEST_RATE and n.name.startswith(f"slices:{regime}/")]
    )
    how = "Spearman's ρ of the same metric at different history lengths (events visible to the query), within a budget."
    return Exhibit(f"slices-{regime}", f"History slices, {regime} regime", views, sheet, how) if views else None


def _sliced_metrics(study: Study, regime: str) -> list[str]:
    return [m for m in study.metrics if m.startswith(regime + "/") and tables_of(study, f"slices:{m}")]
