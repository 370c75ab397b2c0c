"""What the axes with an optimum have in common: a valley per budget, its reading, its table."""

from collections.abc import Callable, Iterable, Sequence

from habitus.reporting.curves import reach, valley
from habitus.reporting.figure import Line, Mark, Panel, PlotAxis, Points, Sheet, Table, View
from habitus.reporting.format import (
    count,
    describe_optimum,
    describe_status,
    format_number,
    format_range,
    join_words,
    percent,
    power_of_ten,
    rate,
    reason,
    sentence,
    significant,
)
from habitus.reporting.study import Study
from habitus.store import Law, RunRow, direction_of


def better(metric: str) -> str:
    """'batch/loss, lower is better'."""
    return f"{metric}, {'lower' if direction_of(metric) == 'min' else 'higher'} is better"


def run_tip(study: Study, row: RunRow, *metrics: str) -> str:
    """The tip of a run: '~7|batch/loss 2.823', which the page completes by the description of run 7."""
    values = " · ".join(f"{m} {significant(row.metrics[m])}" for m in metrics if m in row.metrics)
    return f"~{study.index(row)}|{values}"


def describe_run(row: RunRow) -> str:
    """A run in one line: budget, cell, knobs, learning rate."""
    knobs = row.knobs
    parts = [power_of_ten(row.budget), f"{row.axis} {row.cell_id}"]
    for name, letter, form in (
        ("params", "N", count),
        ("slots_seen", "D", count),
        ("embedder_share", "s", percent),
        ("num_negatives", "K", count),
        ("batch_sequences", "B", count),
    ):
        if name in knobs and (name != "num_negatives" or row.axis == "negatives"):
            parts.append(f"{letter} {form(knobs[name])}")
    return " · ".join([*parts, f"rate {rate(row.learning_rate)}"])


def valley_panel(
    study: Study,
    axis: str,
    knob: str,
    metric: str,
    law_name: str,
    x: PlotAxis,
    curve: Callable[[Law, float, float], tuple[list[float], list[float]] | None] = valley,
) -> Panel | None:
    """All runs of an axis for one metric, a fitted curve per budget, and the optima with their intervals."""
    laws = study.laws_by_budget(law_name, metric)
    marks: list[Mark] = []
    optima: list[Mark] = []
    for budget in study.budgets:
        rows = study.best_rate_runs(axis, budget, [knob, metric])
        if not rows:
            continue
        colour = study.colour(budget)
        xs = [row.knobs[knob] for row in rows]
        law = laws.get(budget)
        line = curve(law, *reach(xs)) if law is not None and any(v > 0 for v in xs) else None
        if line:
            marks.append(Line(*line, colour, power_of_ten(budget)))
        marks.append(
            Points(
                xs,
                [row.metrics[metric] for row in rows],
                colour,
                [run_tip(study, row, metric) for row in rows],
                label="" if line else power_of_ten(budget),
            )
        )
        if law is not None and {"x_opt", "y_opt"} <= set(law.values):
            low, high = reach(xs)
            if low <= law["x_opt"] <= high:
                ends = law.interval("x_opt")
                tips = [f"optimum at {power_of_ten(budget)}: {describe_optimum(law, x.kind)}"]
                optima.append(
                    Points(
                        [law["x_opt"]], [law["y_opt"]], colour, tips, [ends[0]], [ends[1]], "x",
                        hollow=not law.ok, shape="diamond", large=True,
                    )
                )  # fmt: skip
    if not marks:
        return None
    return Panel(better(metric), x, PlotAxis(metric), (*marks, *optima))


def describe_optima(
    study: Study, laws: dict[float, Law], metric: str, what: str, kind: str, paper_name: str = ""
) -> str:
    """The optima in one or two sentences: where they hold, where not and why, and what the paper has."""
    identified = {b: law for b, law in laws.items() if law.ok and "x_opt" in law.values}
    refused = {b: law for b, law in laws.items() if b not in identified}
    parts = []
    if identified:
        top = max(identified)
        reading = (
            f"At {power_of_ten(top)} FLOPs the best {what} for {metric} is {describe_optimum(identified[top], kind)}"
        )
        if len(identified) > 1:
            where = format_range([float(law["x_opt"]) for law in identified.values()], kind)
            reading += f"; over {len(identified)} budgets it lies at {where}"
        parts.append(reading)
    if refused:
        by_reason: dict[tuple[str, str], list[float]] = {}  # reasons hold numbers of their own budget
        for b, law in refused.items():
            by_reason.setdefault((describe_status(law), _short(law)), []).append(b)
        reading = "; ".join(
            f"{join_words(power_of_ten(b) for b in at)}: {status} ({why})" for (status, why), at in by_reason.items()
        )
        parts.append(f"{'No optimum is read at ' if identified else f'Not identified for {metric}: '}{reading}")
    if not laws:
        parts.append(f"No law was fitted for {metric}")
    parts.append(_describe_paper_optima(study, laws, metric, kind, paper_name) if paper_name else "")
    return sentence(*parts)


def _describe_paper_optima(study: Study, laws: Iterable[float], metric: str, kind: str, paper_name: str) -> str:
    """What the paper prints: at the same budgets, or over its own."""
    printed = {
        e.budget: e.law for e in study.published.entries if (e.name, e.metric) == (paper_name, metric) and e.budget
    }
    values = {b: float(law["x_opt"]) for b, law in printed.items() if "x_opt" in law.values}
    if not values:
        return ""
    same = [b for b in laws if b in values]
    if same:
        top = max(same)
        return f"the paper prints {format_number(values[top], kind)} at {power_of_ten(top)}"
    return (
        f"the paper prints {format_range(list(values.values()), kind)} at {power_of_ten(min(values))} to "
        f"{power_of_ten(max(values))}"
    )


def optimum_table(study: Study, name: str, metrics: Sequence[str], kind: str) -> tuple[Table, Sheet]:
    """Metrics against budgets: optimum and interval; below it the best cell, the exponents and the paper's value."""
    laws = {metric: study.laws_by_budget(name, metric) for metric in metrics}
    budgets = sorted({budget for by_budget in laws.values() for budget in by_budget})
    rows, raw = [], []
    for metric, by_budget in laws.items():
        cells = []
        for budget in budgets:
            law = by_budget.get(budget)
            printed = _printed(study.paper_law(name, metric, budget), kind)
            if law is None:
                cells.append("–")
                continue
            low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
            grid = law.details.get("best_on_grid")
            exponents = [f"{letter} {law[n]:.2f}" for n, letter in _EXPONENTS if n in law.values]
            below = [
                f"best cell {format_number(grid, kind)}" if grid is not None else "",
                ", ".join(exponents),
                printed and f"paper {printed}",
            ]
            first = describe_optimum(law, kind) if "x_opt" in law.values else describe_status(law)
            cells.append("\n".join([first, *(line for line in below if line)]))
            raw.append((metric, budget, law.values.get("x_opt"), low, high, law.status, grid, law.values.get("alpha"),
                        law.values.get("beta"), printed))  # fmt: skip
        rows.append((metric, *cells))
    header = (
        "metric", "flops_budget", "optimum", "low95", "high95", "status", "best_on_grid", "alpha", "beta", "paper",
    )  # fmt: skip
    return Table(("metric", *(power_of_ten(b) for b in budgets)), tuple(rows)), Sheet(header, tuple(raw))


_EXPONENTS = (("alpha", "α"), ("beta", "β"))


def _printed(paper: Law | None, kind: str) -> str:
    if paper is None:
        return ""
    return format_number(float(paper["x_opt"]), kind) if "x_opt" in paper.values else describe_status(paper)


def run_sheet(rows: Iterable[RunRow], metrics: Sequence[str], knobs: Sequence[str]) -> Sheet:
    """One line per run: budget, cell, rate, seed, knobs and metrics."""
    rows = list(rows)
    names = [m for m in metrics if any(m in row.metrics for row in rows)]
    present = [k for k in knobs if any(k in row.knobs for row in rows)]
    header = ("axis", "flops_budget", "cell_id", "learning_rate", "seed", *present, *names)
    body = tuple(
        (
            row.axis, row.budget, row.cell_id, row.learning_rate, row.seed,
            *(row.knobs.get(k) for k in present), *(row.metrics.get(m) for m in names),
        )
        for row in rows
    )  # fmt: skip
    return Sheet(header, body)


def make_views(metrics: Iterable[str], make: Callable[[str], View | None]) -> tuple[View, ...]:
    """One view per metric, without those that cannot be drawn."""
    return tuple(view for view in (make(metric) for metric in metrics) if view is not None)


def scatter_line(study: Study, rows: Sequence[RunRow], knob: str, metric: str, budget: float) -> list[Mark]:
    """Runs of one budget, joined by a thin line and labelled."""
    xs, ys = [row.knobs[knob] for row in rows], [row.metrics[metric] for row in rows]
    colour = study.colour(budget)
    return [
        Line(xs, ys, colour, power_of_ten(budget)),
        Points(xs, ys, colour, [run_tip(study, row, metric) for row in rows]),
    ]


def best_row(rows: Sequence[RunRow], metric: str) -> RunRow:
    """The run whose metric is best."""
    pick = min if direction_of(metric) == "min" else max
    return pick(rows, key=lambda row: row.metrics[metric])


def _short(law: Law) -> str:
    return reason(law).rstrip(".")
