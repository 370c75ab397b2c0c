"""What the axes with an optimum have in common: a valley per budget, its reading, its table."""

from collections.abc import Callable, Iterable, Sequence

from habitus.reporting.curves import reach, told, valley
from habitus.reporting.figure import Axis, Line, Mark, Panel, Points, Sheet, Table, View
from habitus.reporting.format import (
    count,
    listed,
    number,
    percent,
    power_of_ten,
    rate,
    reason,
    sentence,
    significant,
    span,
    state,
)
from habitus.reporting.study import Study
from habitus.store import Law, RunRow, direction_of


def better(metric: str) -> str:
    """'batch/loss, lower is better'."""
    return f"{metric}, {'lower' if direction_of(metric) == 'min' else 'higher'} is better"


def run_tip(study: Study, row: RunRow, *metrics: str) -> str:
    """What is said about a run that is pointed at: '~7|batch/loss 2.823', where the page knows run 7 by its words."""
    values = " · ".join(f"{m} {significant(row.metrics[m])}" for m in metrics if m in row.metrics)
    return f"~{study.index(row)}|{values}"


def run_words(row: RunRow) -> str:
    """A run in a few words: budget, cell, knobs, learning rate."""
    knobs = row.knobs
    parts = [power_of_ten(row.budget), f"{row.axis} {row.cell_id}"]
    for name, word, form in (
        ("params", "N", count),
        ("slots_seen", "D", count),
        ("embedder_share", "s", percent),
        ("num_negatives", "K", count),
        ("batch_sequences", "B", count),
    ):
        if name in knobs and (name != "num_negatives" or row.axis == "negatives"):
            parts.append(f"{word} {form(knobs[name])}")
    return " · ".join([*parts, f"rate {rate(row.learning_rate)}"])


def valley_panel(
    study: Study,
    axis: str,
    knob: str,
    metric: str,
    law_name: str,
    x: Axis,
    curve: Callable[[Law, float, float], tuple[list[float], list[float]] | None] = valley,
) -> Panel | None:
    """All runs of an axis for one metric, a fitted curve per budget, and the optima with their intervals."""
    laws = study.by_budget(law_name, metric)
    marks: list[Mark] = []
    tops: list[Mark] = []
    for budget in study.budgets:
        rows = study.chosen(axis, budget, [knob, metric])
        if not rows:
            continue
        colour = study.colour(budget)
        xs = [row.knobs[knob] for row in rows]
        law = laws.get(budget)
        drawn = curve(law, *reach(xs)) if law is not None and any(v > 0 for v in xs) else None
        if drawn:
            marks.append(Line(*drawn, colour, power_of_ten(budget)))
        marks.append(
            Points(
                xs,
                [row.metrics[metric] for row in rows],
                colour,
                [run_tip(study, row, metric) for row in rows],
                label="" if drawn else power_of_ten(budget),
            )
        )
        if law is not None and {"x_opt", "y_opt"} <= set(law.values):
            low, high = reach(xs)
            if low <= law["x_opt"] <= high:
                ends = law.interval("x_opt")
                tips = [f"optimum at {power_of_ten(budget)}: {told(law, x.kind)}"]
                tops.append(
                    Points(
                        [law["x_opt"]], [law["y_opt"]], colour, tips, [ends[0]], [ends[1]], "x",
                        hollow=not law.ok, shape="diamond", large=True,
                    )
                )  # fmt: skip
    if not marks:
        return None
    return Panel(better(metric), x, Axis(metric), (*marks, *tops))


def optimum_reading(
    study: Study, laws: dict[float, Law], metric: str, what: str, kind: str, paper_name: str = ""
) -> str:
    """The optima in one or two sentences: where they hold, where not and why, and what the paper has."""
    held = {b: law for b, law in laws.items() if law.ok and "x_opt" in law.values}
    broken = {b: law for b, law in laws.items() if b not in held}
    parts = []
    if held:
        top = max(held)
        words = f"At {power_of_ten(top)} FLOPs the best {what} for {metric} is {told(held[top], kind)}"
        if len(held) > 1:
            words += f"; over {len(held)} budgets it lies at {span([float(v['x_opt']) for v in held.values()], kind)}"
        parts.append(words)
    if broken:
        by_reason: dict[tuple[str, str], list[float]] = {}  # reasons hold numbers of their own budget
        for b, law in broken.items():
            by_reason.setdefault((state(law), _short(law)), []).append(b)
        words = "; ".join(
            f"{listed(power_of_ten(b) for b in at)}: {word} ({why})" for (word, why), at in by_reason.items()
        )
        parts.append(f"{'No optimum is read at ' if held else f'Not identified for {metric}: '}{words}")
    if not laws:
        parts.append(f"No law was fitted for {metric}")
    parts.append(paper_words(study, laws, metric, kind, paper_name) if paper_name else "")
    return sentence(*parts)


def paper_words(study: Study, laws: Iterable[float], metric: str, kind: str, paper_name: str) -> str:
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
        return f"the paper prints {number(values[top], kind)} at {power_of_ten(top)}"
    return (
        f"the paper prints {span(list(values.values()), kind)} at {power_of_ten(min(values))} to "
        f"{power_of_ten(max(values))}"
    )


def optimum_table(study: Study, name: str, metrics: Sequence[str], kind: str) -> tuple[Table, Sheet]:
    """Metrics against budgets: optimum and interval; below it the best cell, the exponents and the paper's value."""
    laws = {metric: study.by_budget(name, metric) for metric in metrics}
    budgets = sorted({budget for found in laws.values() for budget in found})
    rows, raw = [], []
    for metric, found in laws.items():
        cells = []
        for budget in budgets:
            law = found.get(budget)
            printed = _printed(study.paper(name, metric, budget), kind)
            if law is None:
                cells.append("–")
                continue
            low, high = law.interval("x_opt") if "x_opt" in law.values else (None, None)
            grid = law.details.get("best_on_grid")
            exponents = [f"{letter} {law[n]:.2f}" for n, letter in _EXPONENTS if n in law.values]
            below = [
                f"best cell {number(grid, kind)}" if grid is not None else "",
                ", ".join(exponents),
                printed and f"paper {printed}",
            ]
            first = told(law, kind) if "x_opt" in law.values else state(law)
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
    return number(float(paper["x_opt"]), kind) if "x_opt" in paper.values else state(paper)


def run_sheet(rows: Iterable[RunRow], metrics: Sequence[str], knobs: Sequence[str]) -> Sheet:
    """One line per run: budget, cell, rate, seed, knobs and metrics."""
    kept = list(rows)
    names = [m for m in metrics if any(m in row.metrics for row in kept)]
    present = [k for k in knobs if any(k in row.knobs for row in kept)]
    header = ("axis", "flops_budget", "cell_id", "learning_rate", "seed", *present, *names)
    body = tuple(
        (
            row.axis, row.budget, row.cell_id, row.learning_rate, row.seed,
            *(row.knobs.get(k) for k in present), *(row.metrics.get(m) for m in names),
        )
        for row in kept
    )  # fmt: skip
    return Sheet(header, body)


def views(metrics: Iterable[str], make: Callable[[str], View | None]) -> tuple[View, ...]:
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
