"""The closing table: a model and the baselines on users that chose nothing, each difference with its interval."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.data import Dataset
from habitus.store import TABLE_METRICS, BaselineDifference, EvaluationSide, TableRow, TestTable

if TYPE_CHECKING:
    from habitus.evaluation import PerQuery

_QUERIES = {"cuda": 20_000, "cpu": 4_000}
_PER_USER = 8  # queries of one user in a window, at least: more users, smaller errors


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
            pairs = {name: paired_difference(values[0], kept, name) for name in TABLE_METRICS}
            differences = {name: BaselineDifference(**pair._asdict()) for name, pair in pairs.items()}
        rows.append(
            TableRow(
                scorer="model" if number == 0 else evaluation.scorer,
                metrics={name: evaluation.metrics[f"catalogue/{name}"] for name in TABLE_METRICS},
                differences=differences,
            )
        )
    users = len(set(values[0].user.tolist()))
    return TestTable(side=side, queries=len(values[0].rank), users=users, rows=tuple(rows))
