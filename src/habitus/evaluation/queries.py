"""The queries of an evaluation: fixed by dataset, side, batch and seed, and the same for every model.

The evaluation batch is part of the metric: its windows form one batch-local candidate pool. How much of it is
computed at a time is not.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from habitus.data import Batch, Dataset
from habitus.errors import DataError
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.store import EvaluationSide


@dataclass(frozen=True)
class QueryBatch:
    """One evaluation batch: its windows, and those of its queries that are scored. Arrays are [Q]."""

    number: int
    batch: Batch
    windows: np.ndarray  # place of the query's window in the batch
    slots: np.ndarray
    targets: np.ndarray  # catalogue rows
    events: np.ndarray  # row of the query's last visible event in the log; the target is the next row
    users: np.ndarray
    histories: np.ndarray  # events visible to the query
    pool: np.ndarray  # catalogue rows, sorted: the unique targets of the full batch

    def visible(self, query: int) -> np.ndarray:
        """The items that the query sees, oldest first."""
        window, slot = self.windows[query], self.slots[query]
        return self.batch.items[window, slot + 1 - self.histories[query] : slot + 1]


class QuerySet:
    """The first `queries` queries of the side's windows in the order that `seed` draws.

    With `per_user` a user has at most so many in a window, drawn by the seed as well: more users for the same count.
    """

    def __init__(
        self,
        dataset: Dataset,
        queries: int,
        batch_sequences: int,
        seed: int,
        per_user: int | None = None,
        side: EvaluationSide = "validation",
    ) -> None:
        self.dataset = dataset
        self.batch_sequences = batch_sequences
        self.seed = seed
        self.per_user = per_user
        self.side = side
        counts = dataset.counts(side)
        num_windows = counts.windows
        if num_windows == 0:
            raise DataError(
                f"{dataset.path} has no {side} windows: that side has {counts.users:,} of {dataset.num_users:,} users",
                expected=f"{side} users with two events or more, the later of them a target",
                next_step=f"prepare again with another --split or a larger --{side}-share",
            )
        order = permute_index(np.arange(num_windows), num_windows, shuffle_keys(seed, Stream.EVALUATION, 0))
        _, offsets = dataset.windows(side)
        per_segment = dataset.queries_per_segment(side)
        per_segment = per_segment if per_user is None else np.minimum(per_segment, per_user)
        per_window = np.add.reduceat(per_segment, offsets[:-1])[order]
        self._windows = order[: self._num_windows(per_window, queries)]
        self.num_queries = min(queries, int(per_window.sum()))

    def __iter__(self) -> Iterator[QueryBatch]:
        left = self.num_queries
        for number, first in enumerate(range(0, len(self._windows), self.batch_sequences)):
            batch = self._batch(number, self._windows[first : first + self.batch_sequences], left)
            left -= len(batch.targets)
            yield batch

    @property
    def num_batches(self) -> int:
        return -(-len(self._windows) // self.batch_sequences)

    def targets(self) -> np.ndarray:
        """The unique targets of all queries, sorted."""
        return np.unique(np.concatenate([batch.targets for batch in self]))

    def checksum(self) -> str:
        """What identifies the query set: the log rows of its queries and the windows around them."""
        digest = hashlib.sha256(self._windows.astype("<i8").tobytes())
        digest.update(f"{self.batch_sequences}:{self.num_queries}:{self.dataset.checksum}".encode())
        if self.per_user is not None:
            digest.update(f":{self.per_user}:{self.seed}".encode())
        # Added later, and only where they say something: the checksums of before stay.
        if self.side != "validation":
            digest.update(f":{self.side}".encode())
        if self.dataset.seq_len != self.dataset.manifest.seq_len:
            digest.update(f":seq_len={self.dataset.seq_len}".encode())
        return digest.hexdigest()

    def _num_windows(self, per_window: np.ndarray, queries: int) -> int:
        """How many windows it takes for that many queries, in full evaluation batches."""
        needed = int(np.searchsorted(np.cumsum(per_window), queries)) + 1
        rounded_up = -(-needed // self.batch_sequences) * self.batch_sequences
        return min(rounded_up, len(per_window))

    def _batch(self, number: int, windows: np.ndarray, limit: int) -> QueryBatch:
        batch = self.dataset.gather(self.side, windows)
        rows = self.dataset.event_rows(self.side, windows)
        window, slot = np.nonzero(batch.targets >= 0)
        pool = np.unique(batch.targets[window, slot])
        if self.per_user is not None:
            drawn = self._draw_per_user(window, batch.segments[window, slot], rows[window, slot], self.per_user)
            window, slot = window[drawn], slot[drawn]
        window, slot = window[:limit], slot[:limit]
        return QueryBatch(
            number=number,
            batch=batch,
            windows=window,
            slots=slot,
            targets=batch.targets[window, slot],
            events=rows[window, slot],
            users=batch.users[window, batch.segments[window, slot]],
            histories=batch.positions[window, slot].astype(np.int64) + 1,
            pool=pool,
        )

    def _draw_per_user(self, window: np.ndarray, segment: np.ndarray, events: np.ndarray, most: int) -> np.ndarray:
        """Places of the queries drawn, at most so many of a user in a window, in order."""
        # A permutation of all rows of the log gives every query a number of its own, whatever the batch.
        draw = permute_index(events, len(self.dataset.items), shuffle_keys(self.seed, Stream.EVALUATION, 2))
        order = np.lexsort((draw, segment, window))
        first = np.flatnonzero(np.diff(window[order], prepend=-1) | np.diff(segment[order], prepend=-1))
        lengths = np.diff(first, append=len(order))
        place = np.arange(len(order)) - np.repeat(first, lengths)
        return np.sort(order[place < most])
