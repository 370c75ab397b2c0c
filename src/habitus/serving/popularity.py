"""What is answered where there is no history: how often training had each item, with one more event for every item."""

from collections.abc import Callable, Iterator

import numpy as np

from habitus.serving.catalogue import CandidateItems
from habitus.serving.schemas import RequestError

_CHUNK_ROWS = 1 << 16  # looked at a time: popular items that pass come early


class Popularity:
    """Log-probabilities of the candidates without a history."""

    def __init__(self, candidates: CandidateItems) -> None:
        self.candidates = candidates

    def check(self) -> None:
        """Refuse where it is not known how often items occurred."""
        self._counts()

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """The log-probability of rows, float64; -1 is an item that training did not have, as those added later."""
        counts = self._counts()
        total = float(counts.sum()) + self.candidates.num_active
        origins = np.array([-1, *self.candidates.added_origins], np.int64)  # an item that was changed stays as frequent
        rows = np.where(rows < len(counts), rows, origins[np.maximum(rows - len(counts) + 1, 0)])
        events = np.ones(len(rows))
        events[rows >= 0] += counts[rows[rows >= 0]]
        return np.log(events / total)

    def best(self, k: int, passing: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The k most frequent active rows; `passing` gives the places of the rows that may be listed."""
        chosen = np.empty(0, np.int64)
        for rows in self._by_count():
            active = rows[[row not in self.candidates.hidden for row in rows.tolist()]]
            chosen = np.concatenate([chosen, active[passing(active)]])[:k]
            if len(chosen) == k:
                break
        return chosen

    def _by_count(self) -> Iterator[np.ndarray]:
        self._counts()
        popular, first = self.candidates.catalogue.names.popular_rows, self.candidates.num_trained
        origins = np.array(self.candidates.added_origins, np.int64)
        newest = {int(origins[place]): first + int(place) for place in np.flatnonzero(origins >= 0)}
        for at in range(0, len(popular), _CHUNK_ROWS):
            rows = popular[at : at + _CHUNK_ROWS]
            yield np.array([newest.get(row, row) for row in rows.tolist()], np.int64) if newest else rows
        yield first + np.flatnonzero(origins < 0)

    def _counts(self) -> np.ndarray:
        counts = self.candidates.catalogue.names.counts
        if counts is None:
            raise RequestError(
                "the history is empty, and this run's catalogue was written without counts",
                expected="at least one event",
                next_step="remove RUN/serve/catalogue and serve once with --data DATASET",
            )
        return counts
