"""Metrics as pure functions of ranks, losses and recommended items: one value per query first, means later.

A rank counts from 1, with ties against the model. There is one relevant item per query.
"""

from typing import NamedTuple

import numpy as np

from habitus.errors import ConfigError

CUTOFFS = (1, 5, 10, 20, 50, 100)


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


def coverage(top_items: np.ndarray, k: int, num_candidates: int) -> float:
    """The share of the candidates that stand in the first k of at least one query; -1 fills short lists."""
    first = np.asarray(top_items)[:, : _cutoff(k)]
    return len(np.unique(first[first >= 0])) / num_candidates


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss; infinite where that overflows."""
    return float(np.exp(mean_loss)) if mean_loss < 709 else float("inf")


def mean(values: np.ndarray, users: np.ndarray) -> Mean:
    """The mean of per-query values with its standard error clustered by user."""
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        raise ConfigError("a mean over no queries", expected="at least one query")
    _, label = np.unique(users, return_inverse=True)
    centre = float(values.mean())
    num_users = int(label.max()) + 1
    if num_users < 2:
        return Mean(centre, None, len(values))
    by_user = np.bincount(label, values - centre)
    se = float(np.sqrt((by_user @ by_user) * num_users / (num_users - 1)) / len(values))
    return Mean(centre, se, len(values))


def _cutoff(k: int) -> int:
    if k < 1:
        raise ConfigError(f"a cut-off of k = {k}", expected="k of 1 or more, as in recall@10")
    return k
