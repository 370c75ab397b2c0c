"""The closing table: a model and the baselines on users that chose nothing, each difference with its interval."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from habitus.data import Dataset
from habitus.record import Metric
from habitus.store import EvaluationSide
from habitus.typed import Typed

if TYPE_CHECKING:
    from habitus.evaluation import PerQuery

METRICS = ("recall@10", "ndcg@10", "loss")
_QUERIES = {"cuda": 20_000, "cpu": 4_000}
_PER_USER = 8  # queries of one user in a window, at least: more users, smaller errors


class BaselineDifference(Typed):
    """The model less a baseline; 95% over users."""

    value: float
    low: float | None = None
    high: float | None = None


class TableRow(Typed):
    """One scorer."""

    scorer: str
    metrics: dict[str, Metric]
    differences: dict[str, BaselineDifference] = Field(default_factory=dict)


class TestTable(Typed):
    """The model first, then the baselines."""

    __test__ = False  # not a test of pytest's

    side: str
    queries: int
    users: int
    rows: tuple[TableRow, ...]

    def lines(self) -> list[str]:
        """The table as text."""
        header = f"{'':20}" + "".join(f"{name:>12}" for name in METRICS)
        lines = [f"{self.queries:,} queries of {self.users:,} {self.side} users, whole catalogue", header]
        for row in self.rows:
            lines.append(f"{row.scorer:20}" + "".join(f"{row.metrics[name].value:12.4f}" for name in METRICS))
        lines.append("model less baseline [95% over users]")
        for row in self.rows[1:]:
            cells = (f"{name} {_format(row.differences[name])}" for name in METRICS[:2])
            lines.append(f"  {row.scorer:20} {', '.join(cells)}")
        return lines


def compare_on_test(run: Path, dataset: Dataset, device: str) -> TestTable:
    """The run and all baselines on the same test queries; on validation where the dataset has no test side."""
    from habitus.evaluation import (
        ComputeOptions,
        EvaluateOptions,
        evaluate_runs,
        paired_difference,
        resolve_device,
    )

    side: EvaluationSide = "test" if dataset.has_side("test") else "validation"
    where = resolve_device(device)
    queries = _QUERIES["cuda" if where.type == "cuda" else "cpu"]
    per_user = max(_PER_USER, math.ceil(queries / max(dataset.counts(side).segments, 1)))
    options = EvaluateOptions(
        regimes=("catalogue",), queries=queries, per_user=per_user, cutoffs=(10,), metrics=("loss", "ranking"),
        histories=(), side=side,
    )  # fmt: skip
    values: list[PerQuery] = []
    evaluations = evaluate_runs(
        [run], dataset, options, ComputeOptions(where), with_baselines=True,
        keep=lambda _scorer, _regime, kept: values.append(kept),
    )  # fmt: skip
    rows = []
    for number, (evaluation, kept) in enumerate(zip(evaluations, values, strict=True)):
        differences = {}
        if number:
            pairs = {name: paired_difference(values[0], kept, name) for name in METRICS}
            differences = {name: BaselineDifference(**pair._asdict()) for name, pair in pairs.items()}
        rows.append(
            TableRow(
                scorer="model" if number == 0 else evaluation.scorer,
                metrics={name: evaluation.metrics[f"catalogue/{name}"] for name in METRICS},
                differences=differences,
            )
        )
    users = len(set(values[0].user.tolist()))
    return TestTable(side=side, queries=len(values[0].rank), users=users, rows=tuple(rows))


def _format(difference: BaselineDifference) -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.value:+.4f}"
    return f"{difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
