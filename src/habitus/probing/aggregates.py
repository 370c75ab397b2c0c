"""What people compute by hand: counts, recency, sums and means per field, of the events before a time."""

from collections.abc import Iterator

import numpy as np

from habitus.data import MICROSECONDS_PER_DAY, Dataset, Field
from habitus.exporting import Moments

RECENT_DAYS = (7, 28, 91)
TOP_VALUES = 20  # of a category that are counted
_ITEM_ROWS = 1 << 16


def aggregate(dataset: Dataset, moments: Moments) -> tuple[np.ndarray, tuple[str, ...]]:
    """Features float64 [n, d] of users at times, NaN where missing, and their names.

    Every sum is the difference of two places of a running sum over the log, so that only events of the user before the
    time enter. Counts and sums are on a logarithmic scale.
    """
    columns = dict(_activity(dataset, moments))
    frequent = _before(dataset, moments)
    for field, values in _fields(dataset):
        if field.kind == "number":
            present = ~np.isnan(values)
            total = _sum(np.where(present, values, 0), moments)
            count = _sum(present, moments)
            columns[f"{field.name}: sum"] = _log(total)
            columns[f"{field.name}: mean"] = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
        else:
            counts = np.bincount(values[frequent].ravel(), minlength=field.size)
            counts[0] = 0  # missing
            for code in np.argsort(-counts, kind="stable")[:TOP_VALUES]:
                if counts[code]:
                    hits = (values == code).reshape(len(values), -1).any(1)
                    columns[f"{field.name} = {code}: count"] = _log(_sum(hits, moments))
    return np.column_stack(list(columns.values())), tuple(columns)


def _activity(dataset: Dataset, moments: Moments) -> Iterator[tuple[str, np.ndarray]]:
    """How much, how recently, how varied."""
    yield "events", _log(moments.stops - moments.starts)
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    _, first = np.unique(users * dataset.num_items + dataset.items, return_index=True)
    is_new = np.zeros(dataset.num_events, bool)
    is_new[first] = True
    yield "different items", _log(_sum(is_new, moments))
    if dataset.schema.events.time_unit == "order":
        return
    times = moments.times if moments.times is not None else np.full(len(moments), dataset.times.max() + 1)
    yield "days since the last event", _days(times - dataset.times[moments.stops - 1])
    yield "days since the first event", _days(times - dataset.times[moments.starts])
    for days in RECENT_DAYS:
        since = Moments.of(dataset, moments.users, times - days * MICROSECONDS_PER_DAY)
        yield f"events in {days} days", _log(moments.stops - since.stops)


def _fields(dataset: Dataset) -> Iterator[tuple[Field, np.ndarray]]:
    """Numbers and categories of events and of their items, a value per event of the log."""
    for field in dataset.fields.event:
        if field.kind in ("number", "category"):
            yield field, dataset.event_fields[field.name]
    for field in dataset.fields.item:
        if field.kind in ("number", "category", "categories"):
            yield field, _item_values(dataset, field.name)[dataset.items]


def _item_values(dataset: Dataset, name: str) -> np.ndarray:
    starts = range(0, dataset.num_items, _ITEM_ROWS)
    rows = (np.arange(start, min(start + _ITEM_ROWS, dataset.num_items)) for start in starts)
    return np.concatenate([dataset.item_features(part).fields[name] for part in rows])


def _before(dataset: Dataset, moments: Moments) -> np.ndarray:
    """The events before the earliest time, which say what values are frequent."""
    if moments.times is None:
        return np.ones(dataset.num_events, bool)
    return np.asarray(dataset.times < moments.times.min())


def _sum(values: np.ndarray, moments: Moments) -> np.ndarray:
    """The sum of the events that each row knows."""
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return running[moments.stops] - running[moments.starts]


def _log(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.log1p(np.abs(values))


def _days(microseconds: np.ndarray) -> np.ndarray:
    return _log(microseconds / MICROSECONDS_PER_DAY)
