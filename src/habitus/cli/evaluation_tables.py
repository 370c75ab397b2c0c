"""Evaluations as tables for people: one run in full, several side by side."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from habitus.store import METRICS

if TYPE_CHECKING:
    from rich.table import Table

    from habitus.evaluation import Evaluation
    from habitus.record import Metric

SHOWN_CUTOFF = 10


def print_evaluations(found: "list[Evaluation]") -> None:
    """Print the tables on stdout."""
    from rich.console import Console

    console = Console()
    if len(found) == 1:
        console.print(_all_metrics(found[0]))
    for regime, spec in found[0].specification.items():
        console.print(_slices(found[0], regime) if len(found) == 1 else _side_by_side(found, regime))
        rate = spec.queries / max(found[0].seconds[regime], 1e-9)
        console.print(
            f"{spec.queries:,} queries against {spec.candidates:,} candidates"
            f"{' on average' if regime == 'batch' else ''}, {rate:,.0f} queries/s\n",
            highlight=False,
        )


def _all_metrics(one: "Evaluation") -> "Table":
    """Every metric over all queries, the regimes as columns; standard errors by users."""
    regimes = list(one.specification)
    names = dict.fromkeys(name.partition("/")[2] for name in one.metrics if name.count("/") == 1)
    ordered = sorted(names, key=_order)
    rows = [(name, *(_shown(one.metrics.get(f"{regime}/{name}")) for regime in regimes)) for name in ordered]
    return _table(one.scorer, ["metric", *regimes], rows)


def _slices(one: "Evaluation", regime: str) -> "Table":
    k = _cutoff(one)
    names = [name for name in ("loss", f"recall@{k}", f"ndcg@{k}") if f"{regime}/{name}" in one.metrics]
    slices = dict.fromkeys(name.split("/")[2] for name in one.metrics if name.count("/") == 2)
    rows = []
    for part in slices:
        cells = [one.metrics.get(f"{regime}/{name}/{part}") for name in names]
        if cells and cells[0] is not None:
            rows.append((part, f"{cells[0].n:,}", *map(_shown, cells)))
    return _table(f"{regime} regime by slice", ["slice", "queries", *names], rows)


def _side_by_side(found: "list[Evaluation]", regime: str) -> "Table":
    k = _cutoff(found[0])
    wanted = ("loss", f"recall@{k}", f"ndcg@{k}")
    names = [name for name in wanted if any(f"{regime}/{name}" in one.metrics for one in found)]
    rows = [(one.scorer, *(_shown(one.metrics.get(f"{regime}/{name}")) for name in names)) for one in found]
    return _table(f"{regime} regime (every metric: --out or --json)", ["run", *names], rows)


def _cutoff(one: "Evaluation") -> int:
    """The cut-off that short tables show: 10, or the nearest there is."""
    known = {int(name.rpartition("@")[2]) for name in one.metrics if "/recall@" in name and name.count("/") == 1}
    return min(known, key=lambda k: (abs(k - SHOWN_CUTOFF), k), default=SHOWN_CUTOFF)


def _order(name: str) -> tuple[int, int]:
    metric, _, k = name.partition("@")
    return list(METRICS).index(metric), int(k or 0)


def _shown(metric: "Metric | None") -> str:
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
