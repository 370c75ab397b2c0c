"""Evaluations as printed tables: one run in full, several side by side."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.cli.screen import wide_console
from habitus.store import METRICS, horizon_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from habitus.evaluation import Evaluation
    from habitus.record import EvaluationSpec, Metric
    from habitus.store import Calibration, SliceRow, SliceTable

SHOWN_CUTOFF = 10
_LONGEST_HEAD = 12  # of a column's name that is not wrapped
_WIDE = 90  # characters


def print_evaluations(evaluations: "list[Evaluation]") -> None:
    """Print the tables on stdout."""
    from habitus.cli.horizon import print_horizon

    console = wide_console()
    if len(evaluations) == 1:
        console.print(_all_metrics(evaluations[0]))
    for regime, spec in evaluations[0].specification.items():
        if horizon_of(regime) is not None:
            print_horizon(console, evaluations, regime, _cutoff(evaluations[0]))
            continue
        is_narrow = console.width < _WIDE
        alone = _slices(evaluations[0], regime, is_narrow) if len(evaluations) == 1 else None
        console.print(alone or _side_by_side(evaluations, regime))
        rate = spec.queries / max(evaluations[0].seconds[regime], 1e-9)
        console.print(
            f"{spec.queries:,} {_side(spec)}queries against {spec.candidates:,} candidates"
            f"{' on average' if regime == 'batch' else ''}, {rate:,.0f} queries/s; ± is the standard error\n",
            highlight=False,
        )
    for evaluation in evaluations:
        for table in evaluation.slices:
            _print_slices(console, evaluation.scorer, table)
        if evaluation.calibration is not None:
            _print_calibration(console, evaluation.scorer, evaluation.calibration)


def _print_slices(console: "Console", scorer: str, table: "SliceTable") -> None:
    """A metric by the values of a column, what the worst of them looks like, and how to read the stars."""
    columns = [table.by, "queries", "users", table.metric, "other", "difference [95%]", "p, Holm"]
    rows = [
        (
            row.value,
            f"{row.metric.n:,}",
            f"{row.users:,}",
            _three_digits(row.metric.value),
            "–" if row.reference is None else _three_digits(row.reference),
            _difference(row),
            _p_value(row),
        )
        for row in table.rows
    ]
    against = "" if table.reference is None else f", beside {table.reference}"
    printed = _table(f"{Path(scorer).name} by {table.by} ({table.source}){against}", columns, rows)
    printed.columns[0].min_width = min(len(table.by), _LONGEST_HEAD)  # the name in one piece
    console.print(printed)
    for one in table.examples:
        said = f"; it said {'; '.join(one.first)}" if one.first else ""
        console.print(
            f"  {table.by} = {table.worst}: user {one.user} after {' → '.join(one.history)}: "
            f"{one.target} came, rank {one.rank:,}{said}",
            highlight=False,
            markup=False,
        )
    console.print(
        f"* differs after Holm's adjustment over {table.comparisons} rows; intervals are over users, of single rows\n",
        highlight=False,
        markup=False,
    )


def _difference(row: "SliceRow") -> str:
    if row.difference is None:
        return "–"
    if row.low is None or row.high is None:
        return _three_digits(row.difference, "+")
    low, high = (_three_digits(end, "+") for end in (row.low, row.high))
    return f"{_three_digits(row.difference, '+')} [{low}, {high}]"


def _p_value(row: "SliceRow") -> str:
    if row.p_value is None:
        return "–"
    return ("<.001" if row.p_value < 0.001 else _three_digits(row.p_value)) + (" *" if row.is_significant else "")


def _three_digits(value: float, sign: str = "") -> str:
    """.503, or +.503 with a sign."""
    text = f"{value:{sign}.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def _print_calibration(console: "Console", scorer: str, calibration: "Calibration") -> None:
    """Loss, entropy and calibration error before and after the fitted temperature."""
    columns = ["temperature", "loss", "entropy"]
    columns += [f"ECE, first {k}" for k in calibration.plain.expected_error]
    rows = [
        (
            f"{one.temperature:.4f}",
            f"{one.loss:.4f}",
            f"{one.entropy:.4f}",
            *(f"{error:.4f}" for error in one.expected_error.values()),
        )
        for one in (calibration.plain, calibration.scaled)
    ]
    console.print(_table(f"calibration of {scorer}", columns, rows))
    console.print(
        f"temperature fitted on {calibration.fitted_queries:,} {calibration.fitted_side} queries; "
        f"to serve with it: habitus serve {scorer} --temperature {calibration.temperature:.3f}\n",
        highlight=False,
        markup=False,
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


def _slices(evaluation: "Evaluation", regime: str, is_narrow: bool) -> "Table":
    """Metrics by slice; on a narrow terminal without spaces about ±, so that the names of slices are in one piece."""
    k = _cutoff(evaluation)
    names = [name for name in ("loss", f"recall@{k}", f"ndcg@{k}") if f"{regime}/{name}" in evaluation.metrics]
    if names and f"{regime}/coverage@{k}" in evaluation.metrics:
        names.append(f"coverage@{k}")  # last: its n are batches
    slices = dict.fromkeys(name.split("/")[2] for name in evaluation.metrics if name.count("/") == 2)
    rows = []
    for part in slices:
        cells = [evaluation.metrics.get(f"{regime}/{name}/{part}") for name in names]
        if cells and cells[0] is not None:
            values = map(_format, cells)
            rows.append((part, f"{cells[0].n:,}", *(v.replace(" ± ", "±") if is_narrow else v for v in values)))
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
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    # Seven columns in 80 characters.
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    for number, column in enumerate(columns):
        first = number == 0
        table.add_column(
            column,
            justify="left" if first else "right",
            no_wrap=not first,
            overflow="fold",
            min_width=8 if first else 0,
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
