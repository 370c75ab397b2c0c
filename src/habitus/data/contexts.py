"""Held-out events that have long histories behind them, and windows that show so much of it and no more."""

import numpy as np

from habitus.data.dataset import Dataset
from habitus.data.windows import SEGMENT
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.store import SplitName

MIN_USERS = 20  # with so long a history, or a metric by its length says little
_SPARE = 8  # times as many events are drawn: some may be no targets


def history_reach(dataset: Dataset, side: SplitName = "validation", users: int = MIN_USERS) -> int:
    """The longest history that at least so many users of a side have before an event of it; 0 without such users."""
    begins, ends = dataset.user_parts.part(side)
    before_last = np.sort((ends - 1)[ends > begins])
    return int(before_last[-users]) if len(before_last) >= users else 0


def events_after(dataset: Dataset, side: SplitName, history: int, count: int, seed: int = 0) -> np.ndarray:
    """Rows of at most `count` targets of a side with `history` events or more before them, int64, in a drawn order."""
    users = dataset.user_parts
    begins, ends = users.part(side)
    first = np.maximum(begins, history)
    eligible = np.maximum(ends - first, 0)
    total = int(eligible.sum())
    if total == 0:
        return np.empty(0, np.int64)
    drawn = permute_index(np.arange(min(total, _SPARE * count)), total, shuffle_keys(seed, Stream.EVALUATION, 3))
    before = np.cumsum(eligible) - eligible
    user = np.searchsorted(before + eligible, drawn, side="right")
    rows = users.starts[user] + first[user] + drawn - before[user]
    return rows[dataset.is_target(rows)][:count]


def histories_before(dataset: Dataset, side: SplitName, events: np.ndarray, length: int) -> Dataset:
    """The dataset with one window per event on that side: the `length` events before it, and it as the only target."""
    segments = np.empty(len(events), SEGMENT)
    segments["start"] = events - length
    segments["user"] = np.searchsorted(dataset.user_offsets, events, side="right") - 1
    segments["length"] = length + 1
    segments["first_target"] = length
    return dataset.with_seq_len(length + 1).with_segments(side, segments)
