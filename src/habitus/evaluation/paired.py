"""Two scorers on the same queries: the difference of their metrics, with an interval over users."""

from typing import NamedTuple

import numpy as np

from habitus.errors import ConfigError
from habitus.evaluation.metrics import RANKING_METRICS, Mean, means
from habitus.evaluation.per_query import PerQuery

_NORMAL_95 = 1.959964


class PairedDifference(NamedTuple):
    """First less second, and the 95% interval of it; the queries of one user count as one draw."""

    value: float
    low: float | None  # absent where fewer than two users have a query
    high: float | None


def query_values(values: PerQuery, metric: str) -> np.ndarray:
    """One value per query of a metric named without its regime: loss, recall@10, ndcg@10, …"""
    if metric == "loss":
        if values.loss is None:
            raise ConfigError("a loss per query was not computed", expected="an evaluation with metrics 'loss'")
        return values.loss
    name, _, cutoff = metric.partition("@")
    if name not in RANKING_METRICS or not cutoff.isdigit():
        raise ConfigError(f"{metric!r} has no value per query", expected=f"loss, or {', '.join(RANKING_METRICS)} @k")
    return RANKING_METRICS[name](values.rank, int(cutoff))


def paired_difference(first: PerQuery, second: PerQuery, metric: str) -> PairedDifference:
    """The difference of two scorers in a metric, over the queries that both answered."""
    if not np.array_equal(first.event, second.event):
        raise ConfigError("the two scorers answered different queries", expected="evaluations on one query set")
    difference = query_values(first, metric) - query_values(second, metric)
    [mean] = means(difference[None], first.user)
    return interval_of(mean)


def interval_of(mean: Mean) -> PairedDifference:
    """A mean difference with its 95% interval."""
    if mean.se is None:
        return PairedDifference(mean.value, None, None)
    return PairedDifference(mean.value, mean.value - _NORMAL_95 * mean.se, mean.value + _NORMAL_95 * mean.se)
