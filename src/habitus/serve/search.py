"""From queries to answers: the index proposes, filters dispose, and exact search fills what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from habitus.serve.filters import Filter, Filters
from habitus.serve.histories import History
from habitus.serve.index import SearchIndex
from habitus.serve.live import LiveItems
from habitus.serve.scan import exact_search

# More than k are fetched where some will be left out: as many as were seen, up to a bound, and with a filter four
# times as many. Where that is not enough, the rows that pass are searched by themselves.
MOST_SEEN = 512
OVERFETCH = 4
GATHER_ROWS = 1 << 16
Answer = tuple[np.ndarray, np.ndarray, float]  # scores and rows, best first; log-sum-exp over all live items


@dataclass(frozen=True)
class Asked:
    """A request that was read."""

    history: History
    k: int
    seen: frozenset[int]  # rows to leave out
    filter: Filter
    notes: tuple[str, ...]


class Searcher:
    """Searches the live items of one run."""

    def __init__(self, live: LiveItems, filters: Filters, index: SearchIndex) -> None:
        self.live = live
        self.filters = filters
        self.index = index

    def search(self, queries: Tensor, asked: Sequence[Asked]) -> list[Answer]:
        """The k best rows of each query [M, h] that its request allows, their scores, and the log-sum-exp."""
        queries = queries.to(self.live.dtype)
        wanted = max(_fetched(one) for one in asked)
        found = self.index.search(queries, min(wanted, self.live.num_rows), self.live)
        scores, rows = found.scores.cpu().numpy(), found.rows.cpu().numpy()
        lse = found.lse.cpu().numpy()
        answers = []
        for number, one in enumerate(asked):
            kept = self._kept(one, rows[number])
            if len(kept) < one.k and np.count_nonzero(rows[number] >= 0) < self.live.num_live:
                # What was fetched is not enough, and there is more: search among all rows that may be answers.
                best = self._among(queries[number : number + 1], one)
            else:
                best = scores[number][kept[: one.k]], rows[number][kept[: one.k]]
            answers.append((*best, float(lse[number])))
        return answers

    def _kept(self, one: Asked, rows: np.ndarray) -> np.ndarray:
        """The places of the rows that may be answers, in order."""
        good = rows >= 0
        if one.seen:
            good &= ~np.isin(rows, list(one.seen))
        if one.filter:
            places = np.flatnonzero(good)
            good[places] = self.filters.passing(one.filter, rows[places])
        return np.flatnonzero(good)

    def _among(self, query: Tensor, one: Asked) -> tuple[np.ndarray, np.ndarray]:
        """The best of the rows that pass, by exact search over these alone."""
        rows = self.filters.rows(one.filter)
        if one.seen:
            rows = rows[~np.isin(rows, list(one.seen))]
        if not len(rows):
            return np.empty(0, np.float32), np.empty(0, np.int64)
        best: tuple[Tensor, np.ndarray] | None = None
        for at in range(0, len(rows), GATHER_ROWS):
            part = rows[at : at + GATHER_ROWS]
            found = exact_search(query, [self.live.vectors(part)], min(one.k, len(part)))
            scores, places = found.scores[0].cpu(), part[found.rows[0].cpu().numpy()]
            if best is not None:
                scores, places = torch.cat([best[0], scores]), np.concatenate([best[1], places])
            order = torch.argsort(scores, descending=True, stable=True)[: one.k]  # rows rise from part to part
            best = scores[order], places[order.numpy()]
        assert best is not None
        return best[0].numpy(), best[1]


def _fetched(one: Asked) -> int:
    return (one.k + min(len(one.seen), MOST_SEEN)) * (OVERFETCH if one.filter else 1)
