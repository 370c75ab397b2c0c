"""What histories add: metrics by the events that a query sees, and the table of what is enough."""

from habitus.laws import describe_history
from habitus.reporting.figure import Exhibit, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import format_number, power_of_ten, sentence, significant
from habitus.reporting.runs import better, make_views, run_line
from habitus.reporting.study import Study
from habitus.store import Law

_GAIN = "context_gain"


def history_curves(study: Study) -> Exhibit | None:
    """The metric of the best run of each budget against the events that a query sees, on the same queries."""
    metrics = [m for m in study.metrics if any(law.values for law in study.laws_by_budget(_GAIN, m).values())]

    def view(metric: str) -> View | None:
        laws = {b: law for b, law in study.laws_by_budget(_GAIN, metric).items() if law.values}
        marks: list[Mark] = []
        for budget, law in laws.items():
            rows, colour = law.details["rows"], study.colour(budget)
            x, y = [row["history"] for row in rows], [row["value"] for row in rows]
            tips = [f"{row['history']:,} events: {significant(row['value'])}" for row in rows]
            marks += [run_line(x, y, colour, power_of_ten(budget)), Points(x, y, colour, tips)]
        axis = PlotAxis("newest events that a query sees", log=True, kind="count")
        top = max(laws)
        panel = Panel(better(metric), axis, PlotAxis(metric), tuple(marks))
        return View(sentence(f"At {power_of_ten(top)}: {describe_history(laws[top], metric)}"), metric, (panel,))

    views = make_views(metrics, view)
    how = "Every point of a line has the same queries, whose histories are all as long as the longest shown."
    return Exhibit("history-gain", "What longer histories add", views, _sheet(study, metrics), how) if views else None


def _sheet(study: Study, metrics: list[str]) -> Sheet:
    raw = [
        (metric, budget, law.details["seq_len"], row["history"], row["value"], row["lost"], row["se"], row["seconds"])
        for metric in metrics
        for budget, law in study.laws_by_budget(_GAIN, metric).items()
        for row in law.details.get("rows", ())
    ]
    header = ("metric", "flops_budget", "seq_len", "history", "value", "lost", "lost_se", "query_seconds")
    return Sheet(header, tuple(raw))


def history_table(study: Study) -> Exhibit | None:
    """Metrics against budgets: the history that is within 1% of the longest, with its interval."""
    laws = {metric: found for metric in study.metrics if (found := study.laws_by_budget(_GAIN, metric))}
    if not laws:
        return None
    budgets = sorted({budget for by_budget in laws.values() for budget in by_budget})
    rows, raw = [], []
    for metric, by_budget in laws.items():
        rows.append((metric, *(_cell(by_budget.get(budget)) for budget in budgets)))
        for budget, law in by_budget.items():
            low, high = law.interval("x_opt") if law.values else (None, None)
            raw.append((metric, budget, law.details.get("seq_len"), law.values.get("x_opt"), low, high, law.status))
    identified = sum(law.ok for by_budget in laws.values() for law in by_budget.values())
    total = sum(len(by_budget) for by_budget in laws.values())
    reading = sentence(f"{identified} of {total} lengths lie between two that were measured")
    table = Table(("metric", *(power_of_ten(b) for b in budgets)), tuple(rows))
    header = ("metric", "flops_budget", "seq_len", "history", "low95", "high95", "status")
    title = "History within 1% of the longest"
    return Exhibit("history-gain-table", title, (View(reading, table=table),), Sheet(header, tuple(raw)))


def _cell(law: Law | None) -> str:
    if law is None or not law.values:
        return "–"
    window = format_number(float(law.details["seq_len"]), "count")
    low, high = (format_number(end, "count") for end in law.interval("x_opt"))
    lines = [f"{format_number(law['x_opt'], 'count')} [{low}, {high}] events", f"windows of {window}"]
    return "\n".join([*lines, *law.warnings])
