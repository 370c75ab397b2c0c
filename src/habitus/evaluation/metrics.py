"""Metrics as pure functions of ranks, losses and recommended items: one value per query first, means later.

A rank counts from 1, with ties against the model. There is one relevant item per query.
"""

from typing import NamedTuple

import numpy as np

from habitus.errors import ConfigError


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
    return coverages(top_items, (k,), num_candidates)[0]


def coverages(top_items: np.ndarray, cutoffs: tuple[int, ...], num_candidates: int) -> list[float]:
    """The coverage at each cut-off, in their order."""
    top_items = np.asarray(top_items)
    limit = int(top_items.max(initial=-1)) + 1
    if top_items.size * 100 < limit:  # a few short lists out of a large catalogue: sorting beats marking
        firsts = [top_items[:, : _cutoff(k)] for k in cutoffs]
        return [len(np.unique(first[first >= 0])) / num_candidates for first in firsts]
    seen = np.zeros(limit + 1, bool)  # the last place takes the -1 of short lists
    shares, done = {}, 0
    for k in sorted(cutoffs):
        seen[top_items[:, done : _cutoff(k)]] = True
        shares[k] = np.count_nonzero(seen[:limit]) / num_candidates
        done = k
    return [shares[k] for k in cutoffs]


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss; infinite where that overflows."""
    return float(np.exp(mean_loss)) if mean_loss < 709 else float("inf")


def mean(values: np.ndarray, users: np.ndarray) -> Mean:
    """The mean of per-query values with its standard error clustered by user."""
    return means(np.asarray(values, np.float64)[None], users)[0]


def means(values: np.ndarray, users: np.ndarray) -> list[Mean]:
    """The mean of each row of values [metrics, queries]."""
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


def _cutoff(k: int) -> int:
    if k < 1:
        raise ConfigError(f"a cut-off of k = {k}", expected="k of 1 or more, as in recall@10")
    return k
