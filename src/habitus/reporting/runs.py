"""Runs as the figures show them: dots with their values, lines through their means, rows of a sheet."""

from collections.abc import Callable, Iterable, Sequence

from habitus.reporting.figure import Line, Mark, Points, Sheet, View
from habitus.reporting.format import count, percent, power_of_ten, rate, significant
from habitus.reporting.study import Study
from habitus.store import RunRow, direction_of

MAX_DOTS = 80  # per budget and panel: seeds lie on top of each other, and a page of 10⁴ runs stays small


def better(metric: str) -> str:
    """'batch/loss, lower is better'."""
    return f"{metric}, {'lower' if direction_of(metric) == 'min' else 'higher'} is better"


def best_row(rows: Sequence[RunRow], metric: str) -> RunRow:
    """The run whose metric is best."""
    pick = min if direction_of(metric) == "min" else max
    return pick(rows, key=lambda row: row.metrics[metric])


def values_of_runs(rows: Iterable[RunRow], name: str) -> list[float]:
    """A knob or a metric of every run."""
    return [row.knobs[name] if name in row.knobs else row.metrics[name] for row in rows]


def run_points(
    study: Study,
    rows: Sequence[RunRow],
    x: str | Sequence[float],
    y: str | Sequence[float],
    *metrics: str,
    colour: str = "",
    label: str = "",
) -> Points:
    """Runs of one budget as dots over two knobs or metrics (or values of one's own); a tip has the metrics named.

    Of more than MAX_DOTS runs only some are drawn: the best and the worst, and others at even distances.
    """
    xs = values_of_runs(rows, x) if isinstance(x, str) else list(x)
    ys = values_of_runs(rows, y) if isinstance(y, str) else list(y)
    drawn = _thin(xs, ys)
    return Points(
        [xs[i] for i in drawn],
        [ys[i] for i in drawn],
        colour or study.colour(rows[0].budget),
        [" ".join(significant(rows[i].metrics.get(m)) for m in metrics) for i in drawn],
        runs=[study.index(rows[i]) for i in drawn],
        metrics=metrics,
        num_hidden=len(rows) - len(drawn),
        label=label,
    )


def _thin(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Positions of at most MAX_DOTS points, in their order."""
    if len(xs) <= MAX_DOTS:
        return list(range(len(xs)))
    by_place = sorted(range(len(xs)), key=lambda i: (xs[i], ys[i]))
    step = (len(xs) - 1) / (MAX_DOTS - 3)
    kept = {by_place[round(i * step)] for i in range(MAX_DOTS - 2)}
    return sorted(kept | {min(by_place, key=ys.__getitem__), max(by_place, key=ys.__getitem__)})


def run_line(xs: Sequence[float], ys: Sequence[float], colour: str, label: str = "") -> Line:
    """A line through the mean of y at every x, in the order of x."""
    at: dict[float, list[float]] = {}
    for x, y in sorted(zip(xs, ys, strict=True)):
        at.setdefault(x, []).append(y)
    return Line(list(at), [sum(values) / len(values) for values in at.values()], colour, label)


def joined_runs(study: Study, rows: Sequence[RunRow], x: str, y: str) -> list[Mark]:
    """Runs of one budget over a knob, joined by a labelled line."""
    points = run_points(study, rows, x, y, y)
    line = run_line(values_of_runs(rows, x), values_of_runs(rows, y), points.colour, power_of_ten(rows[0].budget))
    return [line, points]


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
