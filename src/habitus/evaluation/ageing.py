"""How fast a model ages: its metric by the time that has passed since the last event that it was trained on.

Days differ in more than age. Where a run that was trained until later answered the same queries, the difference to it
is paired by query, and only age is left in it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from habitus.data import MICROSECONDS_PER_DAY, Dataset
from habitus.errors import ConfigError, DataError, RunError
from habitus.evaluation.evaluation import EvaluateOptions
from habitus.evaluation.metrics import Mean, means
from habitus.evaluation.paired import PairedDifference, query_values
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.ranks import resolve_device
from habitus.evaluation.runs import ComputeOptions, evaluate_runs
from habitus.progress import Progress
from habitus.store import EvaluationSide, MetricGroup, read_run_record

_NORMAL_95 = 1.959964
_DRAWS = 1000
MIN_USERS = 5  # whose mean says something about replacing a model


class AgeRow(NamedTuple):
    """The queries of some ages of one run."""

    days: tuple[float, float]  # from, to
    users: int
    mean: Mean
    lost: PairedDifference | None  # against the run that was trained until latest before each query, if any was


class UpdateRow(NamedTuple):
    """What a model is worth that is replaced every so many days, against one that never is."""

    every_days: float
    value: float
    gain: PairedDifference


class Ageing(NamedTuple):
    """One run, by age."""

    run: str
    trained_until: int  # microseconds since 1970
    metric: str
    rows: tuple[AgeRow, ...]
    updates: tuple[UpdateRow, ...]


def age_runs(
    paths: Sequence[str | Path],
    dataset: Dataset,
    metric: str = "ndcg@10",
    edges: Sequence[float] | None = None,
    *,
    side: EvaluationSide = "test",
    queries: int = 20_000,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Ageing]:
    """How fast runs age on the later events of a dataset, over the whole catalogue; runs trained earlier come first."""
    groups: tuple[MetricGroup, ...] = ("loss", "ranking") if metric == "loss" else ("ranking",)
    options = EvaluateOptions(regimes=("catalogue",), side=side, queries=queries, metrics=groups)
    compute = ComputeOptions(device=resolve_device(device), other_dataset=True)
    untils = {str(path): _trained_until(Path(path), dataset) for path in paths}
    kept: list[PerQuery] = []
    evaluate_runs(
        list(untils), dataset, options, compute, progress=progress, keep=lambda _run, _regime, one: kept.append(one)
    )
    runs = {name: (until, values) for (name, until), values in zip(untils.items(), kept, strict=True)}
    return measure_ageing(dataset, runs, metric, edges)


def _trained_until(run: Path, dataset: Dataset) -> int:
    """The last training time of a run, from its Record, or from its own dataset for one of an earlier version."""
    record = read_run_record(run)
    until = record.trained_until
    if until is None and record.dataset_checksum == dataset.checksum:
        until = dataset.training_view(record.recipe.data).trained_until
    if until is None:
        raise RunError(
            f"{run} does not say until when its events reached",
            expected="a run on a log with real times, trained by this version or on the dataset that is given",
            next_step="train it again",
        )
    return until


def measure_ageing(
    dataset: Dataset,
    runs: Mapping[str, tuple[int, PerQuery]],
    metric: str,
    edges: Sequence[float] | None = None,
    min_users: int = MIN_USERS,
) -> list[Ageing]:
    """A table per run, empty where no query is later than its training.

    `runs` has the last training time of each and its answers to the same queries. Queries up to that time are left out:
    such a run has seen what others bought then. What replacing a model is worth needs `min_users` with queries of that
    age. `edges` are days; by default a day, a week, four weeks and so on, as far as the log reaches.
    """
    target_times = {name: dataset.times[values.event + 1] for name, (_, values) in runs.items()}
    ages = {name: (target_times[name] - until) / MICROSECONDS_PER_DAY for name, (until, _) in runs.items()}
    scores = {name: query_values(values, metric) for name, (_, values) in runs.items()}
    order = sorted(runs, key=lambda name: runs[name][0])
    if not any((ages[name] > 0).any() for name in order):
        moment = np.datetime64(runs[order[0]][0], "us").astype("datetime64[s]")
        raise DataError(
            f"{order[0]} was trained until {moment}, and no query of {dataset.path} is later",
            expected="a dataset with later events",
            next_step="habitus prepare EVENTS ITEMS --update DATASET --out NEW, or prepare with --split time",
        )
    tables = []
    for place, name in enumerate(order):
        until, values = runs[name]
        later = ages[name] > 0
        if not later.any():
            tables.append(Ageing(name, until, metric, (), ()))
            continue
        bins = _check_edges(edges) if edges is not None else _default_edges(float(ages[name].max()))
        fresher = _freshest(name, order[place + 1 :], runs, ages, scores)
        rows = tuple(
            row
            for low, high in pairwise(bins)
            if (row := _age_row(values, scores[name], ages[name], (low, high), fresher)) is not None
        )
        updates = tuple(
            _update_row(values.user[later], scores[name][later], ages[name][later], days)
            for days in bins[1:-1]
            if days < ages[name].max()  # beyond, it is never replaced
            and len(np.unique(values.user[later][ages[name][later] <= days])) >= min_users
        )
        tables.append(Ageing(name, until, metric, rows, updates))
    return tables


def _freshest(
    name: str,
    later_runs: Sequence[str],
    runs: Mapping[str, tuple[int, PerQuery]],
    ages: Mapping[str, np.ndarray],
    scores: Mapping[str, np.ndarray],
) -> np.ndarray:
    """For each query the score of the run trained until latest before it; NaN where that is this run."""
    best = np.full(len(scores[name]), np.nan)
    for other in later_runs:  # from early to late
        if not np.array_equal(runs[other][1].event, runs[name][1].event):
            raise ConfigError("the runs answered different queries", expected="evaluations on one query set")
        usable = ages[other] > 0
        best[usable] = scores[other][usable]
    return best


def _age_row(
    values: PerQuery, scores: np.ndarray, ages: np.ndarray, days: tuple[float, float], fresher: np.ndarray
) -> AgeRow | None:
    chosen = (ages > days[0]) & (ages <= days[1])
    if not chosen.any():
        return None
    [mean] = means(scores[None, chosen], values.user[chosen])
    paired = chosen & ~np.isnan(fresher)
    lost = None
    if paired.any():
        [difference] = means((scores - fresher)[None, paired], values.user[paired])
        half = None if difference.se is None else _NORMAL_95 * difference.se
        low, high = (None, None) if half is None else (difference.value - half, difference.value + half)
        lost = PairedDifference(difference.value, low, high)
    return AgeRow(days, len(np.unique(values.user[chosen])), mean, lost)


def _update_row(users: np.ndarray, scores: np.ndarray, ages: np.ndarray, days: float) -> UpdateRow:
    """The mean over ages up to `days` against that over all ages, with users drawn again."""
    _, user = np.unique(users, return_inverse=True)
    young = ages <= days
    sums = np.stack([np.bincount(user[young], scores[young], user.max() + 1), np.bincount(user, scores)])
    counts = np.stack([np.bincount(user[young], minlength=user.max() + 1), np.bincount(user)])
    value, never = sums.sum(1) / counts.sum(1)
    drawn = np.random.default_rng(0).integers(0, len(sums[0]), (_DRAWS, len(sums[0])))
    with np.errstate(invalid="ignore"):  # a draw may have nobody of that age
        values = sums[:, drawn].sum(-1) / counts[:, drawn].sum(-1)
    low, high = np.nanquantile(values[0] - values[1], (0.025, 0.975))
    return UpdateRow(days, float(value), PairedDifference(float(value - never), float(low), float(high)))


def _default_edges(longest: float) -> list[float]:
    edges = [0.0]
    for days in (1, 7, 28, 91, 182, 365, 730, 1461, 2922):
        if days >= longest:
            break
        edges.append(float(days))
    return [*edges, float(np.ceil(longest))]


def _check_edges(edges: Sequence[float]) -> list[float]:
    if not edges or any(low >= high for low, high in pairwise((0.0, *edges))):
        raise ConfigError(
            f"days are {', '.join(f'{days:g}' for days in edges) or 'none'}", expected="rising numbers above 0"
        )
    return [0.0, *map(float, edges)]
