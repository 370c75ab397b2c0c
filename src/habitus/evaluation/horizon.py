"""The horizon: of each user with a history before the cut, the set of items in the days after it.

    U  users      k  items per user

One list per user, made at the cut of a split by time; users count equally. Several items are relevant, and the metrics
are those of RecTools' `Recall`, `NDCG(divide_by_achievable=True)` and `MAP`.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import pyarrow as pa

from habitus.data import MICROSECONDS_PER_DAY, SEGMENT, Dataset
from habitus.errors import ConfigError, DataError
from habitus.evaluation.metrics import means
from habitus.evaluation.paired import PairedDifference, interval_of
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.scores import Scorer
from habitus.progress import Progress
from habitus.recipe import HORIZON
from habitus.record import EvaluationSpec, Metric
from habitus.store import EvaluationSide, horizon_regime

_DAYS = {"d": 1.0, "h": 1 / 24}


class HorizonQueries:
    """The users of one horizon, and what came. `horizon` is 7d, 36h, or 7d_new without what a user had before."""

    def __init__(self, dataset: Dataset, horizon: str, side: EvaluationSide = "validation") -> None:
        self.dataset, self.horizon, self.side = dataset, horizon, side
        match = HORIZON.fullmatch(horizon)
        if match is None:
            raise ConfigError(f"the horizon is {horizon!r}", expected="days or hours, as in 7d or 36h")
        self._length = horizon.removesuffix("_new")
        self.days = int(match[1]) * _DAYS[match[2]]
        self.leaves_repeats_out = match[3] is not None
        self._cut, end = _side_span(dataset, side)
        self._until = self._cut + round(self.days * MICROSECONDS_PER_DAY)
        if self._until > end:
            raise DataError(
                f"{_day(self._cut)} + {self._length} is {_day(self._until)}, and the {side} side of "
                f"{dataset.path} covers {(end - self._cut) / MICROSECONDS_PER_DAY:.1f} days, until {_day(end)}",
                expected="a horizon that the log covers",
                next_step=f"a shorter --horizon, or prepare again with a larger --{side}-share",
            )
        self._before, ends = dataset.user_parts.part(side)
        pairs = self._target_pairs(ends)
        has_history = self._before[self._users_of(pairs)] > 0
        self.num_new_users = len(np.unique(self._users_of(pairs[~has_history])))  # for whom no list can be made
        self._relevant, self._seen = pairs[has_history], np.empty(0, np.int64)  # sorted pairs of user and item
        if self.leaves_repeats_out:
            users = np.unique(self._users_of(self._relevant))
            self._seen = self._unique_pairs(self._rows(users, np.zeros_like(users), self._before[users]))
            self._relevant = self._relevant[~_among(self._seen, self._relevant)]
        if not len(self._relevant):
            new = " that is new to them" if self.leaves_repeats_out else ""
            raise DataError(
                f"no user of {dataset.path} with events before {_day(self._cut)} has a target item{new} in the "
                f"{self._length} after it",
                next_step="a longer --horizon" + (", or --repeats count" if new else ""),
            )
        self.users = np.unique(self._users_of(self._relevant))  # rising: those with a history and a relevant item

    @property
    def regime(self) -> str:
        """The first part of its metrics' names."""
        return horizon_regime(self.horizon)

    def describe(self) -> str:
        """How many users and items there are, and who is left out."""
        left_out = f"; left out: {self.num_new_users:,} who first came after it" if self.num_new_users else ""
        return (
            f"{self.regime}: {len(self.users):,} users with events before {_day(self._cut)}, and "
            f"{len(self._relevant) / len(self.users):.1f} items each in the {self._length} after it"
            + (", those that they had before left out" if self.leaves_repeats_out else "")
            + left_out
        )

    def checksum(self) -> str:
        """What identifies the users and their items."""
        digest = hashlib.sha256(self._relevant.astype("<i8").tobytes())
        digest.update(f"{self.horizon}:{self.side}:{self.dataset.seq_len}:{self.dataset.checksum}".encode())
        return digest.hexdigest()

    def batches(self, batch_sequences: int) -> Iterator[QueryBatch]:
        """The users' histories up to the cut, a query after the last event of each; its `target` is the next one."""
        dataset = self.dataset
        segments = np.zeros(len(self.users), SEGMENT)
        before = self._before[self.users]
        segments["user"], segments["length"] = self.users, np.minimum(before, dataset.seq_len)
        segments["start"] = dataset.user_offsets[self.users] + before - segments["length"]
        segments["first_target"] = segments["length"]
        view = dataset.with_segments(self.side, segments)
        num_windows = len(view.windows(self.side).offsets) - 1
        for number, first in enumerate(range(0, num_windows, batch_sequences)):
            windows = np.arange(first, min(first + batch_sequences, num_windows))
            batch, rows = view.gather(self.side, windows), view.event_rows(self.side, windows)
            after = np.pad(batch.segments[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
            window, slot = np.nonzero((batch.segments >= 0) & (batch.segments != after))
            targets = dataset.items[rows[window, slot] + 1]
            if dataset.candidate_rows is not None:  # no rank is asked for, and scorers want a candidate
                targets = np.where(np.isin(targets, dataset.candidate_rows), targets, dataset.candidate_rows[0])
            yield QueryBatch(
                number=number,
                batch=batch,
                windows=window,
                slots=slot,
                targets=targets,
                events=rows[window, slot],
                users=batch.users[window, batch.segments[window, slot]],
                histories=batch.positions[window, slot].astype(np.int64) + 1,
                pool=np.unique(targets),
            )

    def best(self, users: np.ndarray, top: np.ndarray, k: int) -> np.ndarray:
        """Of each user's list the first k items that count, -1 beyond the last."""
        if self.leaves_repeats_out:
            top = np.where(_among(self._seen, self._pairs(users, top)), -1, top)
            top = np.take_along_axis(top, np.argsort(top < 0, axis=1, kind="stable"), axis=1)
        return top[:, :k]

    def num_listed(self, users: np.ndarray, k: int) -> int:
        """How many items a list needs so that k of them count."""
        if not self.leaves_repeats_out:
            return k
        bounds = np.stack([users, users + 1]) * self.dataset.num_items
        return k + int(np.diff(np.searchsorted(self._seen, bounds), axis=0).max())

    def values(self, users: np.ndarray, top: np.ndarray) -> "PerUser":
        """The values of users with their lists [U, k]; the users in rising order."""
        order = np.argsort(users)
        users, top = users[order], top[order]
        counts = np.bincount(np.searchsorted(self.users, self._users_of(self._relevant)))
        hits = (top >= 0) & _among(self._relevant, self._pairs(users, top))
        return PerUser(users, counts[np.searchsorted(self.users, users)], top, hits)

    def _target_pairs(self, ends: np.ndarray) -> np.ndarray:
        """Sorted pairs of users and the items of their target events before the horizon's end."""
        users = np.flatnonzero(ends > self._before)
        rows = self._rows(users, self._before[users], ends[users])
        rows = rows[self.dataset.times[rows] < self._until]
        return self._unique_pairs(rows[self.dataset.is_target(rows)])

    def _rows(self, users: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The rows of the events begins..ends of users."""
        lengths = ends - begins
        first = np.cumsum(lengths) - lengths
        return np.repeat(self.dataset.user_offsets[users] + begins - first, lengths) + np.arange(lengths.sum())

    def _unique_pairs(self, rows: np.ndarray) -> np.ndarray:
        users = np.searchsorted(self.dataset.user_offsets, rows, side="right") - 1
        return np.unique(users * self.dataset.num_items + self.dataset.items[rows])

    def _pairs(self, users: np.ndarray, top: np.ndarray) -> np.ndarray:
        return users[:, None] * self.dataset.num_items + top

    def _users_of(self, pairs: np.ndarray) -> np.ndarray:
        return pairs // self.dataset.num_items


@dataclass(frozen=True)
class PerUser:
    """One entry per user of a horizon."""

    user: np.ndarray
    relevant: np.ndarray  # how many items are
    top: np.ndarray  # [U, k]
    hits: np.ndarray  # bool [U, k]: which of them are

    def metric(self, name: str, k: int) -> np.ndarray:
        """recall, ndcg or map at k, float64 [U]."""
        return HORIZON_MEASURES[name](self.hits, self.relevant, k)

    def table(self, scorer: str, regime: str) -> pa.Table:
        """One row per user."""
        count = len(self.user)
        lists = {"top": pa.array(self.top.ravel()), "hits": pa.array(self.hits.ravel())}
        columns = {name: pa.FixedSizeListArray.from_arrays(flat, self.top.shape[1]) for name, flat in lists.items()}
        return pa.table(
            {
                "scorer": pa.array([scorer] * count, pa.string()),
                "regime": pa.array([regime] * count, pa.string()),
                **{one.name: columns.get(one.name, getattr(self, one.name)) for one in fields(self)},
            }
        )


def set_recall(hits: np.ndarray, relevant: np.ndarray, k: int) -> np.ndarray:
    """The share of the relevant items that is among the first k."""
    return hits[:, :k].sum(axis=1) / relevant


def set_ndcg(hits: np.ndarray, relevant: np.ndarray, k: int) -> np.ndarray:
    """The discounted gains of the first k over those of the best list that there could be."""
    gains = 1.0 / np.log2(np.arange(2, k + 2))
    return (hits[:, :k] * gains[: hits.shape[1]]).sum(axis=1) / np.cumsum(gains)[np.minimum(relevant, k) - 1]


def average_precision(hits: np.ndarray, relevant: np.ndarray, k: int) -> np.ndarray:
    """The precision at each relevant item of the first k, summed, over the number of relevant items."""
    first = hits[:, :k]
    return (first * first.cumsum(axis=1) / np.arange(1, first.shape[1] + 1)).sum(axis=1) / relevant


# By their names in `habitus.store.HORIZON_METRICS`.
HORIZON_MEASURES = {"recall": set_recall, "ndcg": set_ndcg, "map": average_precision}


def score_horizon(
    queries: HorizonQueries,
    scorer: Scorer,
    cutoffs: tuple[int, ...],
    batch_sequences: int,
    progress: Progress | None = None,
) -> PerUser:
    """What a scorer's lists over the catalogue are worth at one horizon."""
    candidates, num_items = queries.dataset.candidate_rows, queries.dataset.num_candidates
    k = min(max(cutoffs), num_items)
    users, tops, done, began = [], [], 0, time.perf_counter()
    for batch in queries.batches(batch_sequences):
        listed = queries.num_listed(batch.users, k)
        top = scorer.score(batch, candidates, min(listed, num_items), losses=False).top
        users.append(batch.users)
        tops.append(queries.best(batch.users, top, k))
        done += len(batch.users)
        if progress is not None:
            rate = done / (time.perf_counter() - began)
            progress(f"{queries.regime}: {rate:,.0f} users/s", done / len(queries.users))
    return queries.values(np.concatenate(users), np.concatenate(tops))


def horizon_metrics(regime: str, values: PerUser, cutoffs: tuple[int, ...]) -> dict[str, Metric]:
    """The means over users by name."""
    metrics = {}
    for name in HORIZON_MEASURES:
        for k, mean in zip(cutoffs, means(_matrix(values, name, cutoffs), values.user), strict=True):
            metrics[f"{regime}/{name}@{k}"] = Metric(value=mean.value, se=mean.se, n=mean.n)
    return metrics


def horizon_spec(queries: HorizonQueries, batch_sequences: int) -> EvaluationSpec:
    """What the Record of an evaluation says of its users."""
    return EvaluationSpec(
        queries=len(queries.users),
        query_set_checksum=queries.checksum(),
        batch_sequences=batch_sequences,
        candidates=queries.dataset.num_candidates,
        side=queries.side,
    )


def horizon_differences(
    regime: str, first: PerUser, second: PerUser, cutoffs: tuple[int, ...]
) -> dict[str, PairedDifference]:
    """The first less the second by metric, paired by user."""
    if not np.array_equal(first.user, second.user):
        raise ConfigError("the two scorers answered for different users", expected="one horizon of one dataset")
    differences = {}
    for name in HORIZON_MEASURES:
        matrix = _matrix(first, name, cutoffs) - _matrix(second, name, cutoffs)
        for k, mean in zip(cutoffs, means(matrix, first.user), strict=True):
            differences[f"{regime}/{name}@{k}"] = interval_of(mean)
    return differences


def _matrix(values: PerUser, name: str, cutoffs: tuple[int, ...]) -> np.ndarray:
    return np.stack([values.metric(name, k) for k in cutoffs])


def _among(sorted_pairs: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Which pairs are among sorted ones."""
    if not len(sorted_pairs):
        return np.zeros(pairs.shape, bool)
    places = np.minimum(np.searchsorted(sorted_pairs, pairs), len(sorted_pairs) - 1)
    return sorted_pairs[places] == pairs


def _side_span(dataset: Dataset, side: EvaluationSide) -> tuple[int, int]:
    """When a side begins and until when the log covers it; refuses splits that have no cut."""
    split = dataset.manifest.split
    if split.kind != "time" or dataset.schema.events.time_unit == "order":
        what = "has no real times" if dataset.schema.events.time_unit == "order" else f"is split by {split.kind!r}"
        raise DataError(
            f"{dataset.path} {what}, so there is no cut after which days count",
            expected="a dataset that was prepared with --split time",
            next_step="habitus prepare EVENTS ITEMS --out DATASET --split time",
        )
    cuts = {"validation": split.time_cut_us, "test": split.test_cut_us}
    if cuts[side] is None:
        dataset.counts(side)  # says that there is no such side
    begins = sorted(cut for cut in cuts.values() if cut is not None)
    for begin, end in pairwise([*begins, int(dataset.times.max())]):
        if begin == cuts[side]:
            return begin, end
    raise AssertionError("every side that exists has a cut")


def _day(microseconds: int) -> str:
    return str(np.datetime64(microseconds, "us").astype("datetime64[m]"))
