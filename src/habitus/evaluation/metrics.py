"""Metrics: one value per query, their means, and the named metrics of an evaluation and of its slices.

A rank counts from 1, with ties against the model. There is one relevant item per query.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from habitus.errors import ConfigError
from habitus.evaluation.per_query import PerQuery
from habitus.record import Metric
from habitus.store import HISTORY_SLICE, MetricGroup

_MAX_LOSS = 700.0  # of which a perplexity is still a number


def summarize(
    regime: str,
    values: PerQuery,
    cutoffs: tuple[int, ...],
    histories: tuple[int, ...],
    groups: tuple[MetricGroup, ...] = ("loss", "ranking"),
) -> dict[str, Metric]:
    """Every per-query metric of the groups, over all queries and over each slice that has any."""
    named = list(_per_query(values, cutoffs, groups))
    if not named:
        return {}
    names = [name for name, _ in named]
    matrix = np.stack([per_query for _, per_query in named])
    metrics = {}
    for slice_name, chosen in _slices(values, histories):
        if not chosen.any():
            continue  # absent rather than zero
        everything = slice_name == ""
        slice_means = means(
            matrix if everything else matrix[:, chosen], values.user if everything else values.user[chosen]
        )
        for name, (value, se, n) in zip(names, slice_means, strict=True):
            metrics[f"{regime}/{name}{slice_name}"] = Metric(value=value, se=se, n=n)
        loss = metrics.get(f"{regime}/loss{slice_name}")
        if loss is not None and loss.value < _MAX_LOSS:
            power = perplexity(loss.value)
            se = None if loss.se is None else power * loss.se  # first order
            metrics[f"{regime}/perplexity{slice_name}"] = Metric(value=power, se=se, n=loss.n)
    return metrics


def coverage_metrics(
    regime: str, values: PerQuery, cutoffs: tuple[int, ...], union: int, histories: tuple[int, ...] = ()
) -> dict[str, Metric]:
    """Coverage in both protocols, the mean over evaluation batches and of all lists together: over all queries and
    over those of each history length that has any.

    `union` is how many candidates there were in all: the catalogue, or the items that were in some batch's pool.
    """
    metrics: dict[str, Metric] = {}
    slices: list[tuple[str, slice | np.ndarray]] = [("", slice(None)), *_history_slices(values, histories)]
    for slice_name, chosen in slices:
        top, batch, pools = values.top[chosen], values.batch[chosen], values.candidates[chosen]
        if not len(top):
            continue  # absent rather than zero
        batches = [np.flatnonzero(batch == number) for number in np.unique(batch)]
        by_batch = np.array([coverages(top[rows], cutoffs, int(pools[rows[0]])) for rows in batches])
        of_union = coverages(top, cutoffs, union)
        for place, k in enumerate(cutoffs):
            column = by_batch[:, place]
            se = float(column.std(ddof=1) / len(column) ** 0.5) if len(column) > 1 else None
            metrics[f"{regime}/coverage@{k}{slice_name}"] = Metric(value=float(column.mean()), se=se, n=len(column))
            metrics[f"{regime}/coverage_union@{k}{slice_name}"] = Metric(value=of_union[place], n=len(top))
    return metrics


class Mean(NamedTuple):
    """A mean over queries, with a standard error that takes the queries of one user as one draw."""

    value: float
    se: float | None  # absent where fewer than two users have a query
    n: int


def recall(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 where the target is among the first k, else 0."""
    return (np.asarray(ranks) <= _cutoff(k)).astype(np.float64)


def ndcg(ranks: np.ndarray, k: int) -> np.ndarray:
    """1/log2(rank + 1) within the first k, else 0; the ideal is 1, since one item is relevant."""
    ranks = np.asarray(ranks, np.float64)
    return np.where(ranks <= _cutoff(k), 1.0 / np.log2(ranks + 1.0), 0.0)


def mrr(ranks: np.ndarray, k: int) -> np.ndarray:
    """1/rank within the first k, else 0."""
    ranks = np.asarray(ranks, np.float64)
    return np.where(ranks <= _cutoff(k), 1.0 / ranks, 0.0)


def precision(ranks: np.ndarray, k: int) -> np.ndarray:
    """The share of the first k that is the target: recall/k, since one item is relevant."""
    return recall(ranks, k) / k


def auc(ranks: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """The share of the other candidates that score less than the target; ties count against the model."""
    others = np.asarray(candidates, np.float64) - 1.0
    return np.where(others > 0, 1.0 - (np.asarray(ranks) - 1.0) / np.maximum(others, 1.0), 1.0)


# By their names in `habitus.store.METRICS`.
RANKING_METRICS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"recall": recall, "ndcg": ndcg, "mrr": mrr}
CLASSIC_METRICS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "hit_rate": recall,
    "precision": precision,
    "map": mrr,
}


def coverages(top_items: np.ndarray, cutoffs: tuple[int, ...], num_candidates: int) -> list[float]:
    """At each cut-off k, the share of the candidates among the first k of some query; -1 fills short lists."""
    top_items = np.asarray(top_items)
    limit = int(top_items.max(initial=-1)) + 1
    if top_items.size * 100 < limit:  # a few short lists out of a large catalogue: sorting beats marking
        firsts = [top_items[:, : _cutoff(k)] for k in cutoffs]
        return [len(np.unique(first[first >= 0])) / num_candidates for first in firsts]
    listed = np.zeros(limit + 1, bool)  # the last place takes the -1 of short lists
    shares, done = {}, 0
    for k in sorted(cutoffs):
        listed[top_items[:, done : _cutoff(k)]] = True
        shares[k] = np.count_nonzero(listed[:limit]) / num_candidates
        done = k
    return [shares[k] for k in cutoffs]


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss; infinite where that overflows."""
    return float(np.exp(mean_loss)) if mean_loss < 709 else float("inf")


def means(values: np.ndarray, users: np.ndarray) -> list[Mean]:
    """The mean of each row of values [metrics, queries], with its standard error clustered by user."""
    values, users = np.asarray(values, np.float64), np.asarray(users)
    count = values.shape[1]
    if count == 0:
        raise ConfigError("a mean over no queries", expected="at least one query")
    centres = values.mean(axis=1)
    order = np.argsort(users, kind="stable")
    ordered = users[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    num_users = len(starts)
    if num_users < 2:
        return [Mean(float(centre), None, count) for centre in centres]
    by_user = np.add.reduceat((values - centres[:, None])[:, order], starts, axis=1)
    errors = np.sqrt((by_user**2).sum(axis=1) * num_users / (num_users - 1)) / count
    return [Mean(float(centre), float(error), count) for centre, error in zip(centres, errors, strict=True)]


def _per_query(
    values: PerQuery, cutoffs: tuple[int, ...], groups: tuple[MetricGroup, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    if values.loss is not None and values.entropy is not None:
        yield "loss", values.loss
        yield "entropy", values.entropy
    by_rank = {**(RANKING_METRICS if "ranking" in groups else {}), **(CLASSIC_METRICS if "classic" in groups else {})}
    for k in cutoffs:
        for name, measure in by_rank.items():
            yield f"{name}@{k}", measure(values.rank, k)
    if "auc" in groups:
        yield "auc", auc(values.rank, values.candidates)


def _slices(values: PerQuery, histories: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    yield "", np.ones(len(values.rank), bool)
    yield from _history_slices(values, histories)
    yield "/cold", values.cold
    yield "/warm", ~values.cold
    yield "/repeat", values.repeat
    yield "/first", ~values.repeat


def _history_slices(values: PerQuery, histories: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    for length in histories:
        yield f"/{HISTORY_SLICE}{length}", values.history == length


def _cutoff(k: int) -> int:
    if k < 1:
        raise ConfigError(f"a cut-off of k = {k}", expected="k of 1 or more, as in recall@10")
    return k
