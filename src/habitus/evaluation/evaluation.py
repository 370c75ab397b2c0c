"""The verb `evaluate`: any scorer, both regimes, all metrics and slices, on one fixed set of queries."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import not_
from typing import Literal

import numpy as np
from pydantic import Field

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation.horizon import HorizonQueries, PerUser, horizon_metrics, horizon_spec, score_horizon
from habitus.evaluation.list_metrics import ItemStatistics, list_metrics
from habitus.evaluation.metrics import coverage_metrics, summarize
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.queries import QueryBatch, QuerySet
from habitus.evaluation.scores import Scorer
from habitus.progress import Progress
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.recipe import Regime
from habitus.record import EvaluationSpec, Metric
from habitus.store import (
    ALL_METRIC_GROUPS,
    CUTOFFS,
    EVALUATION_SIDES,
    HISTORIES,
    METRIC_GROUPS,
    BaselineDifference,
    Calibration,
    EvaluationSide,
    MetricGroup,
    SliceTable,
)
from habitus.typed import Typed


@dataclass(frozen=True)
class EvaluateOptions:
    """What decides an evaluation's numbers, but for the model. The chunk of the computation is not among it."""

    regimes: tuple[Regime, ...] = ("batch", "catalogue")
    queries: int = 20_000
    per_user: int | None = None  # queries of one user in one window at most; None: all of them
    batch_sequences: int = 64
    catalogue_items: int | Literal["all"] = "all"
    cutoffs: tuple[int, ...] = CUTOFFS
    histories: tuple[int, ...] | Literal["fitting"] = "fitting"  # those of HISTORIES that a window can hold
    exclude_history: bool = False
    metrics: tuple[MetricGroup, ...] = METRIC_GROUPS  # the others are not computed where that saves time
    horizons: tuple[str, ...] = ()  # of a split by time: 7d, 36h; 7d_new without what a user had before
    seed: int = 0
    side: EvaluationSide = "validation"  # everything is chosen on validation; test is for the final report

    @property
    def ranks_catalogue(self) -> bool:
        """Whether the vectors of the whole catalogue are needed."""
        return "catalogue" in self.regimes or bool(self.horizons)

    def histories_in(self, seq_len: int) -> tuple[int, ...]:
        """The history lengths of the slices for windows of that many events."""
        if self.histories == "fitting":
            return tuple(length for length in HISTORIES if length < seq_len)
        return self.histories


class Evaluation(Typed):
    """One scorer's metrics under each regime."""

    scorer: str
    dataset_checksum: str
    specification: dict[str, EvaluationSpec] = Field(description="By regime.")
    metrics: dict[str, Metric]
    seconds: dict[str, float] = Field(description="By regime.")
    slices: tuple[SliceTable, ...] = Field((), exclude_if=not_, description="By the values of columns, where asked.")
    less_than_first: dict[str, BaselineDifference] = Field(
        default_factory=dict,
        exclude_if=not_,
        description="By metric of a horizon: the first scorer less this one, paired by user.",
    )
    calibration: Calibration | None = None

    def joined(self, other: "Evaluation") -> "Evaluation":
        """The same with the metrics and times of another evaluation of the scorer beside its own."""
        return self.model_copy(
            update={"metrics": {**self.metrics, **other.metrics}, "seconds": {**self.seconds, **other.seconds}}
        )


def evaluate(
    dataset: Dataset,
    scorer: Scorer,
    options: EvaluateOptions | None = None,
    *,
    progress: Progress | None = None,
    keep: Callable[[str, PerQuery], None] | None = None,
    keep_users: Callable[[str, PerUser], None] | None = None,
) -> Evaluation:
    """The metrics of a scorer. `keep` is called with each regime's per-query values, of which all means are made, and
    `keep_users` with those per user of each horizon."""
    options = options or EvaluateOptions()
    horizons = horizon_queries(dataset, options)
    queries = query_set(dataset, options) if options.regimes else None
    items = ItemStatistics(dataset)
    metrics: dict[str, Metric] = {}
    specification: dict[str, EvaluationSpec] = {}
    seconds: dict[str, float] = {}
    for regime in options.regimes:
        assert queries is not None
        began = time.perf_counter()
        candidates = None if regime == "batch" else catalogue_subset(dataset, queries, options)
        values, union = _score_queries(dataset, scorer, regime, queries, candidates, options, progress)
        groups = tuple(group for group in options.metrics if group != "auc" or not options.exclude_history)
        histories = options.histories_in(dataset.seq_len)
        metrics |= summarize(regime, values, options.cutoffs, histories, groups)
        if "coverage" in options.metrics:
            metrics |= coverage_metrics(regime, values, options.cutoffs, union, histories)
        if "lists" in options.metrics:
            metrics |= list_metrics(regime, values, options.cutoffs, items, union)
        specification[regime] = EvaluationSpec(
            queries=len(values.rank),
            query_set_checksum=queries.checksum(),
            batch_sequences=options.batch_sequences,
            candidates=values.num_candidates,
            side=options.side,
        )
        seconds[regime] = time.perf_counter() - began
        if keep is not None:
            keep(regime, values)
    for users in horizons:
        began = time.perf_counter()
        per_user = score_horizon(users, scorer, options.cutoffs, options.batch_sequences, progress)
        metrics |= horizon_metrics(users.regime, per_user, options.cutoffs)
        specification[users.regime] = horizon_spec(users, options.batch_sequences)
        seconds[users.regime] = time.perf_counter() - began
        if keep_users is not None:
            keep_users(users.regime, per_user)
    return Evaluation(
        scorer=scorer.name,
        dataset_checksum=dataset.checksum,
        specification=specification,
        metrics=metrics,
        seconds=seconds,
    )


def query_set(dataset: Dataset, options: EvaluateOptions) -> QuerySet:
    """The queries that the options name; refuses options and datasets that cannot be evaluated."""
    check_options(dataset, options)
    return QuerySet(dataset, options.queries, options.batch_sequences, options.seed, options.per_user, options.side)


def horizon_queries(dataset: Dataset, options: EvaluateOptions) -> list[HorizonQueries]:
    """The users of each horizon; refused where the dataset does not cover it."""
    check_options(dataset, options)
    return [HorizonQueries(dataset, horizon, options.side) for horizon in options.horizons]


def check_options(dataset: Dataset, options: EvaluateOptions) -> None:
    """Refuse sides, regimes, cut-offs and slices that cannot be computed."""
    if options.side not in EVALUATION_SIDES:
        raise ConfigError(f"side is {options.side!r}", expected=" or ".join(EVALUATION_SIDES))
    unknown = [regime for regime in options.regimes if regime not in ("batch", "catalogue")]
    if unknown or not (options.regimes or options.horizons):
        raise ConfigError(f"regimes {list(options.regimes)}", expected="batch, catalogue or both")
    unknown_groups = [group for group in options.metrics if group not in ALL_METRIC_GROUPS]
    if not options.metrics or unknown_groups:
        raise ConfigError(f"metrics {list(options.metrics)}", expected=f"some of {', '.join(ALL_METRIC_GROUPS)}")
    if options.exclude_history and set(options.metrics) <= {"loss", "auc"}:  # neither is exact then
        raise ConfigError(
            "only losses are requested, and the history is excluded", expected="ranking or coverage: no loss is left"
        )
    if not options.cutoffs:
        raise ConfigError("no cut-offs were given", expected="one or more k, as in recall@10")
    for k in options.cutoffs:
        if k < 1:
            raise ConfigError(f"a cut-off of k = {k}", expected="k of 1 or more")
    for history in options.histories_in(dataset.seq_len):
        if not 1 <= history < dataset.seq_len:
            raise ConfigError(
                f"a history length of {history}",
                expected=f"1 to {dataset.seq_len - 1}: a window holds {dataset.seq_len} events, its target included",
                next_step="leave that slice out; windows have the run's data.seq_len, or the --seq-len of 'prepare'",
            )
    if options.per_user is not None and options.per_user < 1:
        raise ConfigError(f"{options.per_user} queries per user", expected="1 or more, or none for all")
    if options.queries < 1 or options.batch_sequences < 1:
        raise ConfigError(
            f"{options.queries} queries in batches of {options.batch_sequences} windows", expected="1 or more of each"
        )


def catalogue_subset(dataset: Dataset, queries: QuerySet, options: EvaluateOptions) -> np.ndarray | None:
    """The candidates of the catalogue regime: None for all, those of [targets], or a fixed seeded subset of them that
    holds every target."""
    size, allowed, num_items = options.catalogue_items, dataset.candidate_rows, dataset.num_candidates
    if size == "all" or size == num_items:
        return allowed
    targets = queries.targets()
    if not len(targets) <= size <= num_items:
        raise ConfigError(
            f"catalogue_items is {size:,}",
            expected=f"{len(targets):,} (the targets) to {num_items:,} (the catalogue), or all",
        )
    order = permute_index(
        np.arange(min(num_items, size + len(targets))),
        num_items,
        shuffle_keys(options.seed, Stream.EVALUATION, 1),
    )
    order = order if allowed is None else allowed[order]
    others = order[~np.isin(order, targets)]
    return np.sort(np.concatenate([targets, others[: size - len(targets)]]))


def _score_queries(
    dataset: Dataset,
    scorer: Scorer,
    regime: Regime,
    queries: QuerySet,
    candidates: np.ndarray | None,
    options: EvaluateOptions,
    progress: Progress | None,
) -> tuple[PerQuery, int]:
    """The per-query values of one regime, batch after batch, and how many items were a candidate in any of them."""
    k = max(options.cutoffs)
    with_lists = "coverage" in options.metrics or "lists" in options.metrics
    listed = k + dataset.seq_len if options.exclude_history else k if with_lists else 0
    losses = "loss" in options.metrics
    in_some_pool = np.zeros(dataset.num_items, bool)
    parts, events, began = [], 0, time.perf_counter()
    for batch in queries:
        pool = batch.pool if regime == "batch" else candidates
        in_some_pool[slice(None) if pool is None else pool] = True
        scores = scorer.score(batch, pool, listed) if losses else scorer.score(batch, pool, listed, losses=False)
        num_candidates = dataset.num_items if pool is None else len(pool)
        values = PerQuery.of(batch, scores, dataset.item_train_counts, num_candidates)
        parts.append(_without_history(batch, values, k) if options.exclude_history else values)
        events += int((batch.batch.segments >= 0).sum())
        if progress is not None:
            rate = events / (time.perf_counter() - began)
            progress(f"{regime}: {rate:,.0f} events/s", (batch.number + 1) / queries.num_batches)
    joined = PerQuery.concatenate(parts)
    if not len(joined.rank):
        raise ConfigError(
            f"every target of the {queries.num_queries:,} queries is in its own visible history, which was excluded",
            next_step="omit --exclude-history",
        )
    return joined, int(in_some_pool.sum())


def _without_history(batch: QueryBatch, values: PerQuery, k: int) -> PerQuery:
    """First-time targets only, ranked among the items that are not visible to the query.

    Loss and entropy would be those of another distribution, and are left out. A rank beyond the list is
    lowered by the visible items on the list, which is exact for every cut-off up to k.
    """
    first = np.flatnonzero(~values.repeat)
    rank, top = values.rank[first].copy(), np.full((len(first), k), -1, np.int64)
    for place, query in enumerate(first.tolist()):
        listed = values.top[query]
        visible = np.isin(listed, batch.visible(query))
        ahead = min(int(rank[place]), len(listed))  # exactly those that score at least as much as the target
        rank[place] -= int(visible[:ahead].sum())
        others = listed[~visible & (listed >= 0)][:k]
        top[place, : len(others)] = others
    return values.select(first, rank=rank, top=top)
