"""`habitus diff`: what differs between two recipes or runs, and by how much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.laws import PairedUsers
from habitus.progress import Note, Progress
from habitus.record import Metric
from habitus.store import EvaluationSide, read_evaluations
from habitus.studies.subject import Subject

_NORMAL_95 = 1.959964
_LABELS = ("train.stage", "train.seed", "evaluate.seed")  # knobs whose numbers are names
How = Literal["paired", "unpaired", "one figure"]


@dataclass(frozen=True)
class Differing:
    """A knob or a size that is not the same."""

    name: str
    first: Any
    second: Any

    @property
    def ratio(self) -> float | None:
        if self.name in _LABELS:
            return None
        numbers = [x for x in (self.first, self.second) if isinstance(x, int | float) and not isinstance(x, bool)]
        return numbers[1] / numbers[0] if len(numbers) == 2 and numbers[0] else None


@dataclass(frozen=True)
class MetricDifference:
    """Second less first, with its 95% interval; how it was made says how far to trust it."""

    metric: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    how: How


@dataclass(frozen=True)
class ComparedRuns:
    """Two recipes or runs side by side."""

    knobs: tuple[Differing, ...]
    sizes: tuple[Differing, ...]
    metrics: tuple[MetricDifference, ...] = ()
    remarks: tuple[str, ...] = ()

    def to_values(self) -> dict[str, Any]:
        """Plain values for --json."""
        return {
            "knobs": [vars(one) for one in self.knobs],
            "sizes": [vars(one) | {"ratio": one.ratio} for one in self.sizes],
            "metrics": [vars(one) for one in self.metrics],
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class _Asked:
    """How both runs are evaluated."""

    dataset: Dataset
    device: str
    other_dataset: bool
    side: EvaluationSide | None
    queries: int
    note: Note | None
    progress: Progress | None


def compare(
    first: Subject,
    second: Subject,
    *,
    dataset: Dataset | None = None,
    device: str = "cpu",
    other_dataset: bool = False,
    side: EvaluationSide | None = None,
    queries: int = 20_000,
    note: Note | None = None,
    progress: Progress | None = None,
) -> ComparedRuns:
    """What differs between two recipes or runs. With a dataset both runs are evaluated on the same queries now.

    `other_dataset` lets runs of another dataset with the same encoders through. Without a side it is validation, or
    test where a run was trained on the validation events.
    """
    asked = None if dataset is None else _Asked(dataset, device, other_dataset, side, queries, note, progress)
    metrics, remarks = _compare_metrics(first, second, asked)
    return ComparedRuns(
        _differing_knobs(first, second), _differing_sizes(first, second), tuple(metrics), tuple(remarks)
    )


def _differing_knobs(first: Subject, second: Subject) -> tuple[Differing, ...]:
    rows = []
    for section, one in first.recipe:
        other = getattr(second.recipe, section)
        for key in type(one).model_fields:
            if getattr(one, key) != getattr(other, key):
                rows.append(Differing(f"{section}.{key}", getattr(one, key), getattr(other, key)))
    return tuple(rows)


def _differing_sizes(first: Subject, second: Subject) -> tuple[Differing, ...]:
    def sizes(subject: Subject) -> dict[str, float | None]:
        cell, record = subject.cell, subject.record
        took = record.seconds if record is not None else None
        return {
            "parameters N": cell.params,
            "embedder share": cell.embedder_share,
            "slots seen D": cell.slots_seen,
            "D/N": cell.data_ratio,
            "FLOPs, nominal": cell.flops,
            "FLOPs, as run": None if record is None else record.flops_executed,
            "FLOPs, as run, estimated": cell.executed_flops,
            "bytes of a step": cell.bytes["total"],
            "passes over the events": None if record is None else record.epochs or None,
            "seconds, measured": None if took is None else took.warmup + took.train + took.evaluate,
            "seconds, estimated": subject.seconds(subject.recipe),
        }

    one, other = sizes(first), sizes(second)
    known = [name for name in one if one[name] is not None and other[name] is not None]
    for name, estimate in (
        ("FLOPs, as run", "FLOPs, as run, estimated"),
        ("seconds, measured", "seconds, estimated"),
    ):
        if name in known:
            known.remove(estimate)
    return tuple(Differing(name, one[name], other[name]) for name in known if one[name] != other[name])


def _compare_metrics(first: Subject, second: Subject, asked: _Asked | None) -> tuple[list[MetricDifference], list[str]]:
    seeds = "one run each: the intervals are over users, and say nothing of other seeds"
    if asked is not None:
        without = [str(one.path) for one in (first, second) if not one.has_model]
        if without:
            raise ConfigError(
                f"{' and '.join(without)} cannot be evaluated",
                expected="two runs with their models, or no --data",
                next_step="train them first: habitus train RECIPE --data DATASET --out RUN",
            )
        metrics = _evaluate_both(first, second, asked)
        return metrics, [*_trained_elsewhere(first, second, asked.dataset), seeds]
    if first.record is None or second.record is None:
        return [], [f"no metrics: {'neither' if first.record is second.record else 'only one'} has a Record"]
    failed = [str(one.path) for one in (first, second) if one.record is not None and one.record.status == "failed"]
    if failed:
        return [], [f"no metrics: {' and '.join(failed)} failed"]
    if first.record.dataset_checksum != second.record.dataset_checksum:
        return [], [
            "no metrics are compared: the runs are of different datasets; "
            "--data DATASET --other-dataset evaluates both on one"
        ]
    kept = _kept(first, second)
    if kept:
        return kept, [seeds]
    return _of_records(first, second, seeds)


def _trained_elsewhere(first: Subject, second: Subject, dataset: Dataset) -> list[str]:
    """What to bear in mind where a run is of another dataset than it was evaluated on."""
    names = [
        name
        for name, one in (("A", first), ("B", second))
        if one.record is not None and one.record.dataset_checksum != dataset.checksum
    ]
    what = (
        f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} trained on another dataset than {dataset.path}"
    )
    return [f"{what}: users that are asked here may have been trained on there"] if names else []


def _evaluate_both(first: Subject, second: Subject, asked: _Asked) -> list[MetricDifference]:
    """Both on the side asked for; else on validation, or on test where the validation events were trained on."""
    from habitus.evaluation import (
        ComputeOptions,
        EvaluateOptions,
        PerQuery,
        evaluate_runs,
        paired_difference,
        resolve_device,
    )

    values: dict[tuple[str, str], PerQuery] = {}

    def keep(scorer: str, regime: str, per_query: PerQuery) -> None:
        values[scorer, regime] = per_query

    refit = any(one.recipe.data.include_validation for one in (first, second))
    side = asked.side or ("test" if refit else "validation")
    options = EvaluateOptions(regimes=("catalogue",), side=side, queries=asked.queries)
    compute = ComputeOptions(resolve_device(asked.device), asked.other_dataset)
    paths = [first.path, second.path]
    one, other = evaluate_runs(
        paths, asked.dataset, options, compute, progress=asked.progress, note=asked.note, keep=keep
    )
    rows = []
    for metric in ("loss", "recall@10", "ndcg@10", "mrr@10"):
        name = f"catalogue/{metric}"
        if name in one.metrics and name in other.metrics:
            gap = paired_difference(values[other.scorer, "catalogue"], values[one.scorer, "catalogue"], metric)
            first_value, second_value = one.metrics[name].value, other.metrics[name].value
            rows.append(MetricDifference(name, first_value, second_value, gap.value, gap.low, gap.high, "paired"))
    return rows


def _kept(first: Subject, second: Subject) -> list[MetricDifference]:
    """From values per query that `habitus evaluate STORE --keep` left in the store of both; else nothing."""
    if first.record is None or second.record is None or first.store is None or first.store != second.store:
        return []
    one, other = first.record.recipe_hash, second.record.recipe_hash
    paired, rows = PairedUsers(first.store), []
    for evaluation in read_evaluations(first.store):
        metrics = evaluation.runs.get(one, {}), evaluation.runs.get(other, {})
        for name in metrics[0]:
            error = paired.error(one, other, f"{name}/eval={evaluation.name}") if name in metrics[1] else None
            if error is not None:
                rows.append(_row(name, metrics[0][name], metrics[1][name], error, "paired"))
        if rows:
            return rows
    return []


def _of_records(first: Subject, second: Subject, seeds: str) -> tuple[list[MetricDifference], list[str]]:
    """From the means of the Records: without pairs an interval is wider than it need be."""
    assert first.record is not None and second.record is not None
    one, other = first.record, second.record
    asked = [
        (spec.query_set_checksum, spec.side, spec.batch_sequences) if (spec := record.evaluation) else None
        for record in (one, other)
    ]
    rows = []
    for name in one.metrics:
        if name in other.metrics and name.count("/") == 1:
            errors = [metric.se for metric in (one.metrics[name], other.metrics[name]) if metric.se is not None]
            error = math.hypot(*errors) if len(errors) == 2 else None
            how: How = "unpaired" if error is not None else "one figure"
            rows.append(_row(name, one.metrics[name], other.metrics[name], error, how))
    remarks = [
        "unpaired: the Records hold means, so the intervals ignore that the same users were asked and are too wide; "
        "--data DATASET evaluates both runs and pairs their answers",
        seeds,
    ]
    if asked[0] != asked[1]:
        remarks.insert(0, "the Records were measured on different queries: read differences with care")
    return rows, remarks if rows else [
        "no metric is in both Records; --data DATASET evaluates both on the same queries"
    ]


def _row(name: str, first: Metric, second: Metric, error: float | None, how: How) -> MetricDifference:
    gap = second.value - first.value
    ends: Sequence[float | None] = (
        (None, None) if error is None else (gap - _NORMAL_95 * error, gap + _NORMAL_95 * error)
    )
    return MetricDifference(name, first.value, second.value, gap, ends[0], ends[1], how)
