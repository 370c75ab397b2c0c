"""What the lists are like beside being right: diversity, novelty, popularity bias, and how evenly items are shown.

    Q  queries      k  items per query      F  category fields

docs/evaluate.md names the peer and the definition that each of them equals.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from habitus.data import Dataset
from habitus.evaluation.baselines import train_events
from habitus.evaluation.metrics import means
from habitus.evaluation.per_query import PerQuery
from habitus.record import Metric


def list_metrics(
    regime: str, values: PerQuery, cutoffs: tuple[int, ...], items: "ItemStatistics", union: int
) -> dict[str, Metric]:
    """The list metrics of all queries; diversity begins at k = 2, and exists where items have what it compares.

    `union` is how many candidates there were in all: the catalogue, or the items that were in some batch's pool.
    """
    columns = {
        "novelty": mean_over_lists(values.top, items.novelty, cutoffs),
        "popularity": mean_over_lists(values.top, items.popularity, cutoffs),
    }
    if items.codes.shape[1]:
        columns["diversity"] = field_diversity(values.top, items.codes, cutoffs)
    if items.vectors.shape[1]:
        columns["vector_diversity"] = vector_diversity(values.top, items.vectors, cutoffs)
    metrics = {}
    for name, column in columns.items():
        for k, mean in zip(cutoffs, means(column, values.user), strict=True):
            if k > 1 or "diversity" not in name:
                metrics[f"{regime}/{name}@{k}"] = Metric(value=mean.value, se=mean.se, n=mean.n)
    for k in cutoffs:
        metrics[f"{regime}/gini@{k}"] = Metric(value=gini(_shown(values.top, k), union), n=len(values.top))
    return metrics


@dataclass(frozen=True)
class ItemStatistics:
    """What is known of catalogue rows before any list is made; counts are of training events."""

    dataset: Dataset

    @cached_property
    def popularity(self) -> np.ndarray:
        """Each item's share of the training events."""
        counts = self.dataset.item_train_counts
        return counts / max(int(counts.sum()), 1)

    @cached_property
    def novelty(self) -> np.ndarray:
        """The self-information of each item among the training users."""
        rows = train_events(self.dataset)
        users = np.searchsorted(self.dataset.user_offsets, rows, side="right") - 1
        return self_information(users, self.dataset.items[rows], self.dataset.num_items)

    @cached_property
    def codes(self) -> np.ndarray:
        """The category fields, [items, F]; a missing value is a value of its own."""
        return self._fields("category", np.int64)

    @cached_property
    def vectors(self) -> np.ndarray:
        """The vector fields side by side, each row of length 1; missing ones are zero."""
        vectors = np.nan_to_num(self._fields("vector", np.float64))
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)

    def _fields(self, kind: str, dtype: type) -> np.ndarray:
        names = [field.name for field in self.dataset.fields.item if field.kind == kind]
        features = self.dataset.item_features(np.arange(self.dataset.num_items)).fields if names else {}
        columns: list[np.ndarray] = [features[name].reshape(self.dataset.num_items, -1).astype(dtype) for name in names]
        return np.concatenate(columns, axis=1) if columns else np.empty((self.dataset.num_items, 0), dtype)


def self_information(users: np.ndarray, items: np.ndarray, num_items: int) -> np.ndarray:
    """-log2 of the share of the users who had each item, in bits; an item that nobody had counts as one user's."""
    pairs = np.unique(users * num_items + items)
    num_users = np.bincount(pairs % num_items, minlength=num_items)
    return -np.log2(np.maximum(num_users, 1) / max(len(np.unique(users)), 1))


def mean_over_lists(top: np.ndarray, item_values: np.ndarray, cutoffs: tuple[int, ...]) -> np.ndarray:
    """The mean of a value per item over each list's first k, [cut-offs, Q]; -1 fills short lists."""
    listed = top >= 0
    sums = np.where(listed, item_values[np.maximum(top, 0)], 0.0).cumsum(axis=1)
    return np.stack([sums[:, _last(top, k)] / np.maximum(listed[:, :k].sum(axis=1), 1) for k in cutoffs])


def field_diversity(top: np.ndarray, codes: np.ndarray, cutoffs: tuple[int, ...]) -> np.ndarray:
    """The mean share of fields in which two items of a list differ, [cut-offs, Q]; 0 where it has fewer than two."""
    same = np.zeros((len(top), top.shape[1] + 1))  # fields that an item shares with those before it on the list
    for column in codes.T:
        # Empty places are like nothing: each has a code of its own.
        by_place = np.where(top >= 0, column[np.maximum(top, 0)], -1 - np.arange(top.shape[1])).astype(np.int32)
        for place in range(1, top.shape[1]):
            same[:, place + 1] += np.count_nonzero(by_place[:, :place] == by_place[:, place : place + 1], axis=1)
    alike = same / codes.shape[1]
    return _one_less_alike(alike.cumsum(axis=1)[:, 1:], top, cutoffs)


def vector_diversity(top: np.ndarray, vectors: np.ndarray, cutoffs: tuple[int, ...]) -> np.ndarray:
    """The mean of 1 - cosine over the pairs of a list, [cut-offs, Q], given vectors of length 1."""
    alike = np.empty(top.shape)
    step = max(1, (1 << 24) // max(top.shape[1] * vectors.shape[1], 1))
    for first in range(0, len(top), step):
        rows = top[first : first + step]
        chosen = np.where((rows >= 0)[..., None], vectors[np.maximum(rows, 0)], 0.0)
        # The sum over pairs is half of what the squared sum has beyond the squares.
        squares = (chosen**2).sum(axis=2).cumsum(axis=1)
        alike[first : first + step] = ((chosen.cumsum(axis=1) ** 2).sum(axis=2) - squares) / 2
    return _one_less_alike(alike, top, cutoffs)


def gini(shown: np.ndarray, num_candidates: int) -> float:
    """0 where all candidates are shown equally often, near 1 where one item fills all lists.

    G = Σ_i (2i - n - 1)·x_i / (n·Σ x) over the counts x in rising order; candidates that are never shown count as 0.
    """
    counts = np.sort(shown[shown > 0]).astype(np.float64)
    place = np.arange(num_candidates - len(counts) + 1, num_candidates + 1)
    total = counts.sum() * num_candidates
    return float(((2 * place - num_candidates - 1) * counts).sum() / total) if total else 0.0


def _one_less_alike(alike: np.ndarray, top: np.ndarray, cutoffs: tuple[int, ...]) -> np.ndarray:
    """1 less the mean similarity of pairs, given its sums over the pairs of each list's first items [Q, k]."""
    lengths = (top >= 0).cumsum(axis=1)
    rows = []
    for k in cutoffs:
        length = lengths[:, _last(top, k)]
        pairs = length * (length - 1) / 2
        rows.append(np.where(pairs > 0, 1.0 - alike[:, _last(top, k)] / np.maximum(pairs, 1), 0.0))
    return np.stack(rows)


def _last(top: np.ndarray, k: int) -> int:
    """The last place of the first k."""
    return min(k, top.shape[1]) - 1


def _shown(top: np.ndarray, k: int) -> np.ndarray:
    """How often each item is among the first k of a list."""
    first = top[:, :k]
    return np.bincount(first[first >= 0])
