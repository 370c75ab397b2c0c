"""From queries to answers: the index proposes, filters dispose, and exact search fills what is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.serving.filters import Filter, Filters
from habitus.serving.histories import History
from habitus.serving.index import SearchIndex
from habitus.serving.live import LiveItems
from habitus.serving.past_items import Past
from habitus.serving.scan import exact_search

# More than k are fetched where some will be left out: as many as were seen, up to a bound, and with a filter four
# times as many. Where that is not enough, the rows that pass are searched by themselves.
MOST_SEEN = 512
OVERFETCH = 4
GATHER_ROWS = 1 << 16
Best = tuple[np.ndarray, np.ndarray]  # scores and rows, best first
Answer = tuple[np.ndarray, np.ndarray, float]  # the same; log-sum-exp over all live items


@dataclass(frozen=True)
class Asked:
    """A request that was read."""

    history: History
    k: int
    seen: frozenset[int]  # rows to leave out
    filter: Filter
    notes: tuple[str, ...]


class Query(NamedTuple):
    """What the model makes of M histories: their vectors [M, h], and what their past says for itself."""

    vectors: Tensor
    pasts: list[Past]


class Searcher:
    """Searches the live items of one run."""

    def __init__(self, live: LiveItems, filters: Filters, index: SearchIndex) -> None:
        self.live = live
        self.filters = filters
        self.index = index

    def search(self, query: Query, asked: Sequence[Asked]) -> list[Answer]:
        """The k best rows for each history that its request allows, their scores, and the log-sum-exp."""
        queries = query.vectors.to(self.live.dtype)
        wanted = max(_fetched(one, past) for one, past in zip(asked, query.pasts, strict=True))
        found = self.index.search(queries, min(wanted, self.live.num_rows), self.live)
        scores, rows = found.scores.cpu().numpy(), found.rows.cpu().numpy()
        lse = found.lse.cpu().numpy()
        answers = []
        for number, (one, past) in enumerate(zip(asked, query.pasts, strict=True)):
            # The past is scored by itself, so only other rows are wanted of the index.
            left_out = one.seen.union(past.rows.tolist())
            kept = self._kept(rows[number], left_out, one.filter)
            if len(kept) < one.k and np.count_nonzero(rows[number] >= 0) < self.live.num_live:
                # What was fetched is not enough, and there is more: search among all rows that may be answers.
                best = self._among(queries[number : number + 1], one, left_out)
            else:
                best = scores[number][kept[: one.k]], rows[number][kept[: one.k]]
            total = float(lse[number])
            if len(past.rows):
                best, total = self._with_past(best, total, queries[number], one, past)
            answers.append((*best, total))
        return answers

    def _with_past(self, best: Best, total: float, query: Tensor, one: Asked, past: Past) -> tuple[Best, float]:
        """The best rows of all and the log-sum-exp, given those without the items of the past."""
        live = np.array([row not in self.live.hidden for row in past.rows.tolist()], bool)
        rows, added = past.rows[live], past.added[live]
        if not len(rows):
            return best, total
        total = float(np.logaddexp(total, np.logaddexp.reduce(added)))
        plain = (self.live.vectors(rows).double() @ query.double()).cpu().numpy()
        scores = np.logaddexp(plain, added).astype(np.float32)
        kept = self._kept(rows, one.seen, one.filter)
        scores, rows = np.concatenate([best[0], scores[kept]]), np.concatenate([best[1], rows[kept]])
        order = np.lexsort((rows, -scores))[: one.k]
        return (scores[order], rows[order]), total

    def _kept(self, rows: np.ndarray, left_out: frozenset[int], chosen: Filter) -> np.ndarray:
        """The places of the rows that may be answers, in order."""
        good = rows >= 0
        if left_out:
            good &= ~np.isin(rows, list(left_out))
        if chosen:
            places = np.flatnonzero(good)
            good[places] = self.filters.passing(chosen, rows[places])
        return np.flatnonzero(good)

    def _among(self, query: Tensor, one: Asked, left_out: frozenset[int]) -> Best:
        """The best of the rows that pass, by exact search over these alone."""
        rows = self.filters.rows(one.filter)
        if left_out:
            rows = rows[~np.isin(rows, list(left_out))]
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


def _fetched(one: Asked, past: Past) -> int:
    left_out = max(len(one.seen), len(past.rows))
    return (one.k + min(left_out, MOST_SEEN)) * (OVERFETCH if one.filter else 1)
