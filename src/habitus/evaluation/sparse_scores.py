"""Scores of a fixed background over the catalogue that a query raises at a few items.

Nothing of the catalogue's size is touched per query: with the background sorted once, ranks are found by bisection
and sums are corrected at the few items that differ from it.
"""

from abc import ABC
from typing import NamedTuple

import numpy as np

from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.scores import Scores


class _Background(NamedTuple):
    """Weights of the candidates, and what is needed of all of them."""

    weights: np.ndarray  # [C]
    ascending: np.ndarray  # [C]: the same, sorted
    best_first: np.ndarray  # [C]: places by weight; among equals the lower place first
    total: float
    sum_w_log_w: float

    @classmethod
    def of(cls, weights: np.ndarray) -> "_Background":
        best_first = np.argsort(-weights, kind="stable")
        return cls(weights, weights[best_first[::-1]], best_first, float(weights.sum()), float(_w_log_w(weights).sum()))

    def num_at_least(self, threshold: float) -> int:
        return len(self.ascending) - int(np.searchsorted(self.ascending, threshold))


class SparseScorer(ABC):
    """A scorer whose probabilities are proportional to a background plus additions at a few items of each query."""

    name: str

    def __init__(self, background: np.ndarray) -> None:
        self.num_items = len(background)
        self.background = background
        self._catalogue = _Background.of(background)

    def additions(self, queries: QueryBatch, query: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct catalogue rows and what the query adds to their weights."""
        return np.empty(0, np.int64), np.empty(0)

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        background = self._catalogue if candidates is None else _Background.of(self.background[candidates])
        targets = queries.targets if candidates is None else np.searchsorted(candidates, queries.targets)
        num_queries = len(targets)
        rank, top = np.empty(num_queries, np.int64), np.full((num_queries, k), -1, np.int64)
        loss, entropy = np.empty(num_queries), np.empty(num_queries)
        for query, target in enumerate(targets.tolist()):
            places, added = self.additions(queries, query)
            if candidates is not None:
                places, added = _places_among(candidates, places, added)
            before = background.weights[places]
            after = before + added
            weight = float(background.weights[target] + added[places == target].sum())
            rank[query] = background.num_at_least(weight) - int((before >= weight).sum()) + int((after >= weight).sum())
            if losses:
                total = background.total + float(added.sum())
                sum_w_log_w = background.sum_w_log_w + float((_w_log_w(after) - _w_log_w(before)).sum())
                loss[query] = np.log(total) - np.log(weight)
                entropy[query] = np.log(total) - sum_w_log_w / total
            if k:
                best = _best_places(background, places, after, k)
                top[query, : len(best)] = best if candidates is None else candidates[best]
        return Scores(loss if losses else None, entropy if losses else None, rank, top)


def _w_log_w(weights: np.ndarray) -> np.ndarray:
    return weights * np.log(weights)


def _places_among(candidates: np.ndarray, items: np.ndarray, added: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of the items that are candidates, by their places among them."""
    places = np.minimum(np.searchsorted(candidates, items), len(candidates) - 1)
    present = candidates[places] == items
    return places[present], added[present]


def _best_places(background: _Background, places: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """The k best places, best first; among equals the lower one first."""
    leaders = background.best_first[: k + len(places)]
    leaders = leaders[~np.isin(leaders, places)][:k]
    contenders = np.concatenate([leaders, places])
    contender_weights = np.concatenate([background.weights[leaders], weights])
    return contenders[np.lexsort((contenders, -contender_weights))[:k]]
