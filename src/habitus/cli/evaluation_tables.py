"""Evaluations as printed tables: one run in full, several side by side."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from habitus.store import METRICS

if TYPE_CHECKING:
    from rich.table import Table

    from habitus.evaluation import Evaluation
    from habitus.record import EvaluationSpec, Metric

SHOWN_CUTOFF = 10


def print_evaluations(evaluations: "list[Evaluation]") -> None:
    """Print the tables on stdout."""
    from rich.console import Console

    console = Console()
    if len(evaluations) == 1:
        console.print(_all_metrics(evaluations[0]))
    for regime, spec in evaluations[0].specification.items():
        console.print(_slices(evaluations[0], regime) if len(evaluations) == 1 else _side_by_side(evaluations, regime))
        rate = spec.queries / max(evaluations[0].seconds[regime], 1e-9)
        console.print(
            f"{spec.queries:,} {_side(spec)}queries against {spec.candidates:,} candidates"
            f"{' on average' if regime == 'batch' else ''}, {rate:,.0f} queries/s\n",
            highlight=False,
        )


def _side(spec: "EvaluationSpec") -> str:
    """What stands before 'queries': nothing for validation, as everywhere."""
    return "" if spec.side == "validation" else f"{spec.side} "


def _all_metrics(evaluation: "Evaluation") -> "Table":
    """Every metric over all queries, the regimes as columns; standard errors by users."""
    regimes = list(evaluation.specification)
    names = dict.fromkeys(name.partition("/")[2] for name in evaluation.metrics if name.count("/") == 1)
    ordered = sorted(names, key=_order)
    rows = [(name, *(_format(evaluation.metrics.get(f"{regime}/{name}")) for regime in regimes)) for name in ordered]
    return _table(evaluation.scorer, ["metric", *regimes], rows)


def _slices(evaluation: "Evaluation", regime: str) -> "Table":
    k = _cutoff(evaluation)
    names = [name for name in ("loss", f"recall@{k}", f"ndcg@{k}") if f"{regime}/{name}" in evaluation.metrics]
    slices = dict.fromkeys(name.split("/")[2] for name in evaluation.metrics if name.count("/") == 2)
    rows = []
    for part in slices:
        cells = [evaluation.metrics.get(f"{regime}/{name}/{part}") for name in names]
        if cells and cells[0] is not None:
            rows.append((part, f"{cells[0].n:,}", *map(_format, cells)))
    return _table(f"{regime} regime by slice", ["slice", "queries", *names], rows)


def _side_by_side(evaluations: "list[Evaluation]", regime: str) -> "Table":
    k = _cutoff(evaluations[0])
    columns = ("loss", f"recall@{k}", f"ndcg@{k}")
    names = [name for name in columns if any(f"{regime}/{name}" in evaluation.metrics for evaluation in evaluations)]
    rows = [
        (evaluation.scorer, *(_format(evaluation.metrics.get(f"{regime}/{name}")) for name in names))
        for evaluation in evaluations
    ]
    return _table(f"{regime} regime (every metric: --out or --json)", ["run", *names], rows)


def _cutoff(evaluation: "Evaluation") -> int:
    """The cut-off that short tables show: 10, or the nearest there is."""
    cutoffs = {
        int(name.rpartition("@")[2]) for name in evaluation.metrics if "/recall@" in name and name.count("/") == 1
    }
    return min(cutoffs, key=lambda k: (abs(k - SHOWN_CUTOFF), k), default=SHOWN_CUTOFF)


def _order(name: str) -> tuple[int, int]:
    metric, _, k = name.partition("@")
    return list(METRICS).index(metric), int(k or 0)


def _format(metric: "Metric | None") -> str:
    if metric is None:
        return "–"
    if metric.se is None:
        return f"{metric.value:.4g}" if metric.value >= 10 else f"{metric.value:.4f}"
    digits = 4 if metric.value < 10 else 2
    return f"{metric.value:.{digits}f} ± {metric.se:.{digits}f}"


def _table(title: str, columns: list[str], rows: Iterable[tuple[str, ...]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
