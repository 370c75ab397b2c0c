"""Queries for the oracle: which item comes after this history? And means over them, with standard errors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from habitus.errors import DataError


@dataclass(frozen=True)
class Queries:
    """Predict `targets[q]` from `items[starts[q]:ends[q]]`, oldest first; all int64.

    Queries may share `items`, as the flat item column of a log sorted by user and time. A history must begin
    with the user's first event, for the law depends on all of it. Queries with one start are of one user.
    """

    items: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    targets: np.ndarray

    @classmethod
    def of_events(cls, items: np.ndarray, user_starts: np.ndarray, events: np.ndarray) -> "Queries":
        """Queries for the given rows of a log; `user_starts` holds the first row of each user, ascending."""
        items = np.asarray(items, dtype=np.int64)
        user_starts, events = np.asarray(user_starts, dtype=np.int64), np.asarray(events, dtype=np.int64)
        owner = np.searchsorted(user_starts, events, side="right") - 1
        return cls(items, user_starts[owner], events, items[events])

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """Events in each history."""
        return self.ends - self.starts

    def part(self, first: int, last: int) -> "Queries":
        """The queries in [first, last)."""
        return Queries(self.items, self.starts[first:last], self.ends[first:last], self.targets[first:last])

    def chunks(self, cells: int, cells_per_query: int = 1) -> Iterator["Queries"]:
        """The queries in order, in parts of about `cells` cells; a history event counts as one cell as well."""
        ends = np.cumsum(np.maximum(self.lengths, cells_per_query))
        first = 0
        while first < self.count:
            before = ends[first - 1] if first else 0
            last = max(int(np.searchsorted(ends, before + cells, side="right")), first + 1)
            yield self.part(first, last)
            first = last

    def expand(self) -> tuple[np.ndarray, np.ndarray]:
        """The query number and the item of every event of every history, one history after the other."""
        lengths = self.lengths
        owner = np.repeat(np.arange(self.count), lengths)
        before = np.cumsum(lengths) - lengths
        rows = np.arange(len(owner)) + np.repeat(self.starts - before, lengths)
        return owner, self.items[rows]


class Estimate(NamedTuple):
    """A mean over queries; its standard error takes the queries of one user as one draw."""

    value: float
    se: float
    num_queries: int
    num_users: int


def estimate(values: np.ndarray, clusters: np.ndarray) -> Estimate:
    """The mean of `values` with a standard error clustered by `clusters` (one label per value)."""
    _, label = np.unique(clusters, return_inverse=True)
    num_users = int(label.max()) + 1 if len(label) else 0
    if num_users < 2:
        raise DataError(
            f"the sample has {len(values)} queries of {num_users} users",
            expected="queries of at least 2 users: a standard error is taken over users",
        )
    mean = float(np.mean(values))
    by_user = np.bincount(label, values - mean)
    se = float(np.sqrt(np.sum(by_user**2) * num_users / (num_users - 1)) / len(values))
    return Estimate(mean, se, len(values), num_users)
