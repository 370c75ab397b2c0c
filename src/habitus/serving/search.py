"""From queries to ranked items: the index proposes, filters apply, and exact search fills up what is missing.

M  requests      h  joint_dim      V  rows of the trained catalogue      n  distinct items of a history
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.data import Encoders
from habitus.model import MASKED_COPY_SCORE
from habitus.serving.candidates import CandidateItems, Popularity
from habitus.serving.encoding import EncodedHistory
from habitus.serving.index import SearchIndex, exact_search
from habitus.serving.limits import Limits
from habitus.serving.schemas import RecommendRequest, RequestError
from habitus.serving.values import check_names, in_range, read_category, read_range

# More than k rows are fetched if some will be left out: as many as were seen, up to a bound, and with a filter four
# times as many. If that is not enough, the rows that pass are searched by themselves.
_MAX_SEEN = 512
OVERFETCH = 4
GATHER_ROWS = 1 << 16
_MAX_MASKS = 16
_Conditions = tuple[tuple[str, frozenset[str | None]], ...]
_Ranges = tuple[tuple[str, float, float], ...]  # field, lowest, highest
_Top = tuple[np.ndarray, np.ndarray]  # scores and rows, best first


@dataclass(frozen=True)
class Filter:
    """Values by category: every category of `allow` must match, none of `deny` may. None is a missing value."""

    allow: _Conditions = ()
    deny: _Conditions = ()
    ranges: _Ranges = ()  # a missing number is in none

    def __bool__(self) -> bool:
        return bool(self.allow or self.deny or self.ranges)

    def passes(self, categories: Mapping[str, Any]) -> bool:
        """Whether an item with these categories may be recommended."""
        in_ranges = all(in_range(categories.get(name), low, high) for name, low, high in self.ranges)
        return (
            in_ranges
            and all(_has_one(categories.get(name), values) for name, values in self.allow)
            and not any(_has_one(categories.get(name), values) for name, values in self.deny)
        )


def _has_one(value: str | Sequence[str] | None, values: frozenset[str | None]) -> bool:
    """Whether an item's category, or one of several, is among the values."""
    return value in values if value is None or isinstance(value, str) else not values.isdisjoint(value)


class PastItems(NamedTuple):
    """The distinct items of one history, and the logarithm of what their events add to the item's exponential."""

    rows: np.ndarray  # int64 [n], rising
    added: np.ndarray  # float64 [n]

    def active(self, hidden: set[int]) -> "PastItems":
        """Those that may be recommended."""
        places = np.array([row not in hidden for row in self.rows.tolist()], bool)
        return PastItems(self.rows[places], self.added[places])

    def shares(self, scores: np.ndarray | np.floating, rows: np.ndarray) -> np.ndarray:
        """Of rows with their scores: the share of the exponential that the history's events added, float64."""
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        added = np.where(self.rows[places] == rows, self.added[places], -np.inf)
        return np.minimum(np.exp(added - scores), 1.0)


@dataclass(frozen=True)
class EncodedRequest:
    """A request as the searcher reads it."""

    history: EncodedHistory
    k: int
    exclude: frozenset[int]  # rows to leave out
    filter: Filter
    notes: tuple[str, ...] = ()
    only: np.ndarray | None = None  # rows to choose from; None: all


class RankedRows(NamedTuple):
    """The best rows for one request, best first, and the log-sum-exp over all active rows.

    `copied` are the shares of the rows' exponentials that copying added, and `total_copied` that of all rows' sum;
    None without copying.
    """

    scores: np.ndarray
    rows: np.ndarray
    lse: float
    copied: np.ndarray | None = None
    total_copied: float | None = None
    temperature: float = 1.0  # that scores are divided by in `lse` and in probabilities

    def probabilities(self) -> np.ndarray:
        """Of the rows being the next event, among all active rows."""
        return np.minimum(np.exp(self.scores.astype(np.float64) / self.temperature - self.lse), 1.0)


class Standing(NamedTuple):
    """Where an item stands among all that may come next."""

    rank: int  # 1 is the best; ties count against it
    score: float
    probability: float
    copied: float | None  # as in RankedRows


@dataclass(frozen=True)
class AllScores:
    """The scores of all rows for one history, float32 [V + added]; -inf for those that are hidden."""

    scores: np.ndarray
    past: PastItems
    temperature: float = 1.0

    @cached_property
    def lse(self) -> float:
        scaled = self.scores.astype(np.float64) / self.temperature
        return float(scaled.max() + np.log(np.exp(scaled - scaled.max()).sum()))

    def of_row(self, row: int) -> Standing:
        """The standing of a row."""
        score = self.scores[row]
        copied = float(self.past.shares(score, np.array([row]))[0]) if len(self.past.rows) else None
        rank = int(np.count_nonzero(self.scores >= score))
        return Standing(rank, float(score), float(np.exp(score / self.temperature - self.lse)), copied)

    def of_new(self, score: float) -> Standing:
        """The standing of an item that is not among the rows, if it were."""
        rank = 1 + int(np.count_nonzero(self.scores >= score))
        scaled = score / self.temperature
        probability = float(np.exp(scaled - np.logaddexp(self.lse, scaled)))
        return Standing(rank, score, probability, 0.0 if len(self.past.rows) else None)


class Searcher:
    """Searches the candidates of one run."""

    def __init__(self, candidates: CandidateItems, encoders: Encoders, index: SearchIndex, limits: Limits) -> None:
        self.candidates = candidates
        self.index = index
        self.filters = FilterMasks(candidates, encoders, limits)
        self.popularity = Popularity(candidates)
        self.temperature = 1.0  # of the probabilities; the order of items does not depend on it

    def search(
        self, vectors: Tensor, past_items: Sequence[PastItems], requests: Sequence[EncodedRequest]
    ) -> list[RankedRows]:
        """The k best rows that each request allows, for the query vectors [M, h] of their histories."""
        queries = vectors.to(self.candidates.dtype)
        fetch = max(_num_fetched(request, past) for request, past in zip(requests, past_items, strict=True))
        result = self.index.search(queries, min(fetch, self.candidates.num_rows), self.candidates)
        scores, rows = result.scores.cpu().numpy(), result.rows.cpu().numpy()
        lse = result.lse.cpu().numpy().tolist()
        ranked = []
        for number, (request, past) in enumerate(zip(requests, past_items, strict=True)):
            # Items of the history are scored by themselves, so only other rows are wanted of the index.
            exclude = request.exclude.union(past.rows.tolist())
            places = self._passing(rows[number], exclude, request)
            all_fetched = np.count_nonzero(rows[number] >= 0) == self.candidates.num_active
            if request.only is not None or (len(places) < request.k and not all_fetched):
                # Few are to choose from, or the rows fetched are not enough: search all rows that pass.
                top = self._search_passing(queries[number : number + 1], request, exclude)
            else:
                top = scores[number][places[: request.k]], rows[number][places[: request.k]]
            total = lse[number]
            if not len(past.rows):
                ranked.append(RankedRows(*top, total))
                continue
            top, total = self._add_past_items(top, total, queries[number], request, past)
            mass = past.active(self.candidates.hidden).added
            total_copied = float(np.exp(np.logaddexp.reduce(mass, initial=-np.inf) - total))
            ranked.append(RankedRows(*top, total, past.shares(*top), min(total_copied, 1.0)))
        return ranked if self.temperature == 1 else self._at_temperature(ranked, vectors, past_items)

    def _at_temperature(
        self, ranked: list[RankedRows], vectors: Tensor, past_items: Sequence[PastItems]
    ) -> list[RankedRows]:
        """The same rows, with the log-sum-exp of scores divided by the temperature."""
        temperature = self.temperature
        queries = (vectors / temperature).to(self.candidates.dtype)
        sums = self.index.search(queries, 1, self.candidates).lse.cpu().numpy().tolist()
        scaled = []
        for one, query, lse, past in zip(ranked, queries, sums, past_items, strict=True):
            rows, added = past.active(self.candidates.hidden)
            if len(rows):
                plain = (self.candidates.vectors(rows).double() @ query.double()).cpu().numpy()
                copied = np.logaddexp(plain * temperature, added) / temperature
                lse += float(np.log1p((np.exp(copied - lse) - np.exp(plain - lse)).sum()))
            scaled.append(one._replace(lse=lse, temperature=temperature))
        return scaled

    def popular(self, request: EncodedRequest) -> RankedRows:
        """The most frequent rows that a request without a history allows, with their log-probabilities."""
        rows = self.popularity.best(request.k, lambda rows: self._passing(rows, request.exclude, request))
        return RankedRows(self.popularity.scores(rows), rows, 0.0)

    def score_rows(self, vector: Tensor, past: PastItems, rows: np.ndarray, vectors: Tensor) -> np.ndarray:
        """The scores of vectors for one query vector [h], float64; the first of them are those of the given rows."""
        query = vector.to(self.candidates.dtype).float()
        scores = (vectors @ query.to(vectors.device)).double().cpu().numpy()
        if len(past.rows):
            places = np.minimum(np.searchsorted(past.rows, rows), len(past.rows) - 1)
            added = np.where(past.rows[places] == rows, past.added[places], -np.inf)
            scores[: len(rows)] = np.logaddexp(scores[: len(rows)], added)
        return scores

    def score_all(self, vector: Tensor, past: PastItems) -> AllScores:
        """The scores of all rows for one query vector [h], whatever the index."""
        query = vector.to(self.candidates.dtype).float()
        scores = np.concatenate(
            [
                (piece[at : at + GATHER_ROWS].to(query.device).float() @ query).cpu().numpy()
                for piece in self.candidates.pieces()
                for at in range(0, len(piece), GATHER_ROWS)
            ]
        )
        scores[past.rows] = np.logaddexp(scores[past.rows].astype(np.float64), past.added)
        scores[list(self.candidates.hidden)] = -np.inf
        return AllScores(scores, past, self.temperature)

    def nearest(self, vector: Tensor, k: int) -> np.ndarray:
        """The k rows whose vectors [h] have the largest product with the given one, best first."""
        query = vector.to(self.candidates.device, self.candidates.dtype)[None]
        result = self.index.search(query, min(k, self.candidates.num_rows), self.candidates)
        rows: np.ndarray = result.rows[0].cpu().numpy()
        return rows[rows >= 0]

    def _add_past_items(
        self, top: _Top, lse: float, query: Tensor, request: EncodedRequest, past: PastItems
    ) -> tuple[_Top, float]:
        """The best rows and the log-sum-exp, given those without the items of the history."""
        rows, added = past.active(self.candidates.hidden)
        if not len(rows):
            return top, lse
        lse = float(np.logaddexp(lse, np.logaddexp.reduce(added)))
        products = (self.candidates.vectors(rows).double() @ query.double()).cpu().numpy()
        scores = np.logaddexp(products, added).astype(np.float32)
        places = self._passing(rows, request.exclude, request)
        scores, rows = np.concatenate([top[0], scores[places]]), np.concatenate([top[1], rows[places]])
        order = np.lexsort((rows, -scores))[: request.k]
        return (scores[order], rows[order]), lse

    def _passing(self, rows: np.ndarray, exclude: frozenset[int], request: EncodedRequest) -> np.ndarray:
        """The places of the rows that may be recommended, in order."""
        passing = rows >= 0
        if exclude:
            passing &= ~np.isin(rows, list(exclude))
        if request.only is not None:
            passing &= np.isin(rows, request.only)
        if request.filter:
            places = np.flatnonzero(passing)
            passing[places] = self.filters.passes(request.filter, rows[places])
        return np.flatnonzero(passing)

    def _search_passing(self, query: Tensor, request: EncodedRequest, exclude: frozenset[int]) -> _Top:
        """The best of all rows that pass, by exact search over these alone."""
        rows = self.filters.passing_rows(request.filter) if request.only is None else np.unique(request.only)
        rows = rows[self._passing(rows, exclude, request)]
        top_scores, top_rows = torch.empty(0), np.empty(0, np.int64)
        for at in range(0, len(rows), GATHER_ROWS):
            part = rows[at : at + GATHER_ROWS]
            result = exact_search(query, [self.candidates.vectors(part)], min(request.k, len(part)))
            top_scores = torch.cat([top_scores, result.scores[0].cpu()])
            top_rows = np.concatenate([top_rows, part[result.rows[0].cpu().numpy()]])
            order = torch.argsort(top_scores, descending=True, stable=True)[: request.k]  # rows rise from part to part
            top_scores, top_rows = top_scores[order], top_rows[order.numpy()]
        return top_scores.numpy(), top_rows


class FilterMasks:
    """The rows that pass a request's filter; masks over the trained catalogue are cached."""

    def __init__(self, candidates: CandidateItems, encoders: Encoders, limits: Limits) -> None:
        self.candidates = candidates
        self.codes = encoders.item_codes
        self.kinds = {name: kind for name, kind in encoders.item_kinds.items() if kind in ("number", "time")}
        self.limits = limits
        self._masks: OrderedDict[Filter, np.ndarray] = OrderedDict()

    def read(self, request: RecommendRequest) -> tuple[Filter, tuple[str, ...]]:
        """The filter of a request, and notes about allowed values that no item of the trained catalogue has."""
        allow = self._read_conditions("allow", request.allow)
        deny = self._read_conditions("deny", request.deny)
        notes = [
            f"no item of the trained catalogue has {name} = {value[:60]!r}"
            for name, values in allow
            for value in sorted(value for value in values if value is not None and value not in self.codes[name])
        ]
        return Filter(allow, deny, self._read_ranges(request.ranges)), tuple(notes)

    def passes(self, item_filter: Filter, rows: np.ndarray) -> np.ndarray:
        """Which of the given rows pass, bool."""
        first_added = self.candidates.num_trained
        passes = np.empty(len(rows), bool)
        trained = rows < first_added
        passes[trained] = self._mask(item_filter)[rows[trained]]
        for place in np.flatnonzero(~trained):
            passes[place] = item_filter.passes(self.candidates.added_categories[rows[place] - first_added])
        return passes

    def passing_rows(self, item_filter: Filter) -> np.ndarray:
        """All active rows that pass, in order."""
        first_added, hidden = self.candidates.num_trained, self.candidates.hidden
        mask = self._mask(item_filter).copy()
        mask[[row for row in hidden if row < first_added]] = False
        added = [
            row
            for row, categories in enumerate(self.candidates.added_categories, first_added)
            if row not in hidden and item_filter.passes(categories)
        ]
        return np.concatenate([np.flatnonzero(mask), np.array(added, np.int64)])

    def _mask(self, item_filter: Filter) -> np.ndarray:
        """Which rows of the trained catalogue pass, bool [V]."""
        if item_filter in self._masks:
            self._masks.move_to_end(item_filter)
            return self._masks[item_filter]
        mask = np.ones(self.candidates.num_trained, bool)
        for name, values in item_filter.allow:
            mask &= self._matches(name, values)
        for name, values in item_filter.deny:
            mask &= ~self._matches(name, values)
        for name, low, high in item_filter.ranges:
            numbers = self.candidates.catalogue.numbers[name]
            mask &= (numbers >= low) & (numbers <= high)
        self._masks[item_filter] = mask
        if len(self._masks) > _MAX_MASKS:
            self._masks.popitem(last=False)
        return mask

    def _matches(self, name: str, values: frozenset[str | None]) -> np.ndarray:
        """Which rows of the trained catalogue have one of these values, bool [V]."""
        codes = {0 if value is None else self.codes[name].get(value, -1) for value in values}
        table = np.zeros(len(self.codes[name]) + 1, bool)
        table[[code for code in codes if code >= 0]] = True
        column = self.candidates.catalogue.codes[name]
        if column.ndim == 1:
            return table[column]
        is_missing = ~column.any(axis=1)  # a zero elsewhere is the end of an item's categories
        return np.where(is_missing, table[0], (table[column] & (column > 0)).any(axis=1))

    def _read_ranges(self, ranges: Mapping[str, tuple[object, object]]) -> _Ranges:
        check_names("ranges", ranges, self.kinds)
        stored = self.candidates.catalogue.numbers
        unstored = next((name for name in ranges if name not in stored), None)
        if unstored is not None:
            raise RequestError(
                f"ranges names {unstored!r}, which this run's catalogue was written without",
                next_step="remove RUN/serve/catalogue and serve once with --data DATASET",
            )
        return tuple((name, *read_range(f"ranges.{name}", self.kinds[name], ranges[name])) for name in sorted(ranges))

    def _read_conditions(self, what: str, conditions: Mapping[str, Sequence[object]]) -> _Conditions:
        check_names(what, conditions, self.codes)
        longest = self.limits.max_text
        return tuple(
            (name, frozenset(read_category(f"{what}.{name}", value, longest) for value in conditions[name]))
            for name in sorted(conditions)
        )


def collect_past_items(
    copy_scores: Tensor | None, items: np.ndarray, windows: np.ndarray, slots: np.ndarray
) -> list[PastItems]:
    """The past items of every history of a batch, whose last event is at a window and slot.

    `copy_scores` [B, L, L] is the model's, None without copying; `items` [B, L] are the rows of the batch's events.
    """
    if copy_scores is None:
        return [PastItems(np.empty(0, np.int64), np.empty(0))] * len(windows)
    past_items = []
    last_scores = copy_scores[windows, slots].double().cpu().numpy()
    for window, scores in zip(windows.tolist(), last_scores, strict=True):
        present = scores > MASKED_COPY_SCORE / 2
        rows, place = np.unique(items[window][present], return_inverse=True)
        added = np.full(len(rows), -np.inf)
        np.logaddexp.at(added, place, scores[present])
        past_items.append(PastItems(rows, added))
    return past_items


def _num_fetched(request: EncodedRequest, past: PastItems) -> int:
    excluded = max(len(request.exclude), len(past.rows))
    return (request.k + min(excluded, _MAX_SEEN)) * (OVERFETCH if request.filter else 1)
