"""From per-query values to named metrics: over all queries, by history length, and by kind of target."""

from collections.abc import Iterator

import numpy as np

from habitus.evaluation.metrics import coverages, means, mrr, ndcg, perplexity, recall
from habitus.evaluation.per_query import PerQuery
from habitus.record import Metric

LARGEST_LOSS = 700.0  # of which a perplexity is still a number


def summarise(regime: str, values: PerQuery, cutoffs: tuple[int, ...], histories: tuple[int, ...]) -> dict[str, Metric]:
    """Every per-query metric over all queries and over each slice that has any."""
    named = list(_per_query(values, cutoffs))
    if not named:
        return {}
    names = [name for name, _ in named]
    matrix = np.stack([per_query for _, per_query in named])
    metrics = {}
    for slice_name, chosen in _slices(values, histories):
        if not chosen.any():
            continue  # what is missing is absent
        whole = slice_name == ""
        found = means(matrix if whole else matrix[:, chosen], values.user if whole else values.user[chosen])
        for name, (value, se, n) in zip(names, found, strict=True):
            metrics[f"{regime}/{name}{slice_name}"] = Metric(value=value, se=se, n=n)
        loss = metrics.get(f"{regime}/loss{slice_name}")
        if loss is not None and loss.value < LARGEST_LOSS:
            power = perplexity(loss.value)
            se = None if loss.se is None else power * loss.se  # first order
            metrics[f"{regime}/perplexity{slice_name}"] = Metric(value=power, se=se, n=loss.n)
    return metrics


def coverage_metrics(regime: str, values: PerQuery, cutoffs: tuple[int, ...], union: int) -> dict[str, Metric]:
    """Coverage in both protocols: the mean over evaluation batches, and of all lists together.

    `union` is how many candidates there were in all: the catalogue, or the items that were in some batch's pool.
    """
    batches = [np.flatnonzero(values.batch == number) for number in np.unique(values.batch)]
    each = np.array([coverages(values.top[rows], cutoffs, int(values.candidates[rows[0]])) for rows in batches])
    together = coverages(values.top, cutoffs, union)
    metrics = {}
    for place, k in enumerate(cutoffs):
        column = each[:, place]
        se = float(column.std(ddof=1) / len(column) ** 0.5) if len(column) > 1 else None
        metrics[f"{regime}/coverage@{k}"] = Metric(value=float(column.mean()), se=se, n=len(column))
        metrics[f"{regime}/coverage_union@{k}"] = Metric(value=together[place], n=len(values.rank))
    return metrics


def _per_query(values: PerQuery, cutoffs: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if values.loss is not None and values.entropy is not None:
        yield "loss", values.loss
        yield "entropy", values.entropy
    for k in cutoffs:
        yield f"recall@{k}", recall(values.rank, k)
        yield f"ndcg@{k}", ndcg(values.rank, k)
        yield f"mrr@{k}", mrr(values.rank, k)


def _slices(values: PerQuery, histories: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    yield "", np.ones(len(values.rank), bool)
    for length in histories:
        yield f"/history={length}", values.history == length
    yield "/cold", values.cold
    yield "/warm", ~values.cold
    yield "/repeat", values.repeat
    yield "/first", ~values.repeat
