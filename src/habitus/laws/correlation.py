"""Rank correlations between metrics: within a budget, pooled, across slices, regimes and negatives.

Spearman's ρ with average ranks for ties. The permutation interval is where ρ falls in 95% of random
pairings of the same values: a ρ inside it says nothing. It is drawn for few values and taken from the normal
distribution for many. Missing values drop the pair of rows, never become numbers.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns
from habitus.store import Correlation, CorrelationTable, Surrogacy
from habitus.units import pluralize

_PERMUTATIONS = 4000
_MANY = 500  # from so many pairs on, ρ of random pairings is normal to more digits than permutations show
_FADE_BELOW = 0.02  # of the metric's level: a spread over K that small ranks noise


def spearman_matrix(table: Mapping[str, Numbers], label: str = "all", seed: int = 0) -> CorrelationTable:
    """Spearman's ρ, n and permutation interval for every pair of columns. NaN marks a missing value."""
    names = list(table)
    if len(names) < 2:
        raise FitError(pluralize(len(names), "column"), expected="two or more metrics to compare")
    data, length = _columns(table)
    pairs = [_pair(a, b, data[a], data[b], seed) for i, a in enumerate(names) for b in names[i + 1 :]]
    return CorrelationTable(label=label, names=tuple(names), pairs=tuple(pairs), num_rows=length)


def correlation_by_budget(budget: Numbers, table: Mapping[str, Numbers], seed: int = 0) -> tuple[CorrelationTable, ...]:
    """One table per budget, then one that pools them. Pooled ρ mostly shows that compute helps everything."""
    (C,) = as_columns(budget=budget)
    table, _ = _columns(table, len(C))
    within = [spearman_matrix({k: v[c == C] for k, v in table.items()}, f"{c:.3g}", seed) for c in np.unique(C)]
    return (*within, spearman_matrix(table, "pooled", seed))


def slice_agreement(budget: Numbers, slices: Mapping[str, Numbers], seed: int = 0) -> tuple[CorrelationTable, ...]:
    """Per budget, how alike the slices of one metric rank the cells; `.worst()` is the pair that agrees least."""
    return correlation_by_budget(budget, slices, seed)[:-1]


def surrogacy(
    budget: Numbers, in_batch_loss: Numbers, metrics: Mapping[str, Numbers], seed: int = 0
) -> tuple[Surrogacy, ...]:
    """Whether the in-batch training loss ranks K as each metric does, budget by budget.

    A cell is faded where the metric's spread over K is under 2%: there is nothing to rank.
    """
    (C,) = as_columns(budget=budget)
    (loss,) = _columns({"in_batch_loss": in_batch_loss}, len(C))[0].values()
    metrics, _ = _columns(metrics, len(C))
    rows = []
    for c in np.unique(C):
        for name, values in metrics.items():
            column = values[c == C]
            if not np.isfinite(column).any():
                continue
            level = float(np.abs(np.nanmean(column)))
            spread = float(np.nanmax(column) - np.nanmin(column)) / level if level > 0 else 0.0
            pair = _pair("train/in_batch_loss", name, loss[c == C], column, seed)
            rows.append(
                Surrogacy(budget=float(c), metric=name, correlation=pair, spread=spread, faded=spread < _FADE_BELOW)
            )
    return tuple(rows)


def paired_regimes(
    local: Mapping[str, Numbers], catalogue: Mapping[str, Numbers], seed: int = 0
) -> tuple[Correlation, ...]:
    """ρ between the same metric in both regimes, for checkpoints that were scored in both."""
    shared = [name for name in local if name in catalogue]
    if not shared:
        raise FitError("no metric stands in both regimes", expected="metrics such as loss and ndcg@10 under both names")
    here, length = _columns({name: local[name] for name in shared})
    there, _ = _columns({name: catalogue[name] for name in shared}, length)
    return tuple(_pair(f"batch/{name}", f"catalogue/{name}", here[name], there[name], seed) for name in shared)


def _columns(table: Mapping[str, Numbers], num_rows: int | None = None) -> tuple[dict[str, np.ndarray], int]:
    """Equally long columns of float64 and their length; what is not finite counts as missing."""
    data = {}
    for name, values in table.items():
        try:
            column = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise FitError(
                f"{name} holds something that is not a number", expected="numbers; NaN where missing"
            ) from None
        if column.ndim != 1:
            raise FitError(f"{name} has shape {column.shape}", expected="one number per run, in one row")
        data[name] = np.where(np.isfinite(column), column, np.nan)
    lengths = {len(column) for column in data.values()} | ({num_rows} if num_rows is not None else set())
    if len(lengths) > 1:
        raise FitError(f"columns of lengths {sorted(lengths)}", expected="one row per run in every column")
    return data, max(lengths, default=0)


def _pair(a: str, b: str, x: np.ndarray, y: np.ndarray, seed: int) -> Correlation:
    both = np.isfinite(x) & np.isfinite(y)
    n = int(both.sum())
    if n < 3 or np.ptp(x[both]) == 0 or np.ptp(y[both]) == 0:
        return Correlation(first=a, second=b, n=n)
    u, v = (_standard_ranks(column[both].tobytes()) for column in (x, y))
    low, high = _chance_interval(u, v, seed)
    return Correlation(first=a, second=b, n=n, rho=float(np.clip(u @ v, -1, 1)), chance_low=low, chance_high=high)


def _chance_interval(u: np.ndarray, v: np.ndarray, seed: int) -> tuple[float, float]:
    """Where ρ of random pairings of two columns of ranks lies."""
    if len(u) >= _MANY:
        high = float(stats.norm.ppf(0.975)) / np.sqrt(len(u) - 1)
        return -high, high
    return _permuted(np.sort(u).tobytes(), np.sort(v).tobytes(), seed)


@lru_cache(maxsize=4096)
def _permuted(u: bytes, v: bytes, seed: int) -> tuple[float, float]:
    """By permutations. Only which ranks there are matters: columns without ties share a draw where they are as long."""
    shuffled = np.random.default_rng(seed).permuted(np.tile(np.frombuffer(v), (_PERMUTATIONS, 1)), axis=1)
    low, high = np.quantile(shuffled @ np.frombuffer(u), [0.025, 0.975])
    return float(low), float(high)


@lru_cache(maxsize=256)
def _standard_ranks(values: bytes) -> np.ndarray:
    """Average ranks, centred, of length one; kept, since each column meets all the others."""
    ranks = stats.rankdata(np.frombuffer(values))
    centred = ranks - ranks.mean()
    return centred / np.linalg.norm(centred)
