"""Windows of events: histories cut at seq_len, short ones packed several to a window.

A segment is a stretch of one user's events that attention may look across. A window is seq_len slots that hold
one or more segments and, at its end, perhaps empty slots.
"""

from typing import NamedTuple

import numpy as np

# start: first event of the segment; first_target: offset from which its events count as targets.
SEGMENT = np.dtype([("start", "<i8"), ("user", "<i8"), ("length", "<i4"), ("first_target", "<i4")])


class Windows(NamedTuple):
    """Segments in window order; window w holds segments[offsets[w]:offsets[w + 1]]."""

    segments: np.ndarray
    offsets: np.ndarray


def training_segments(starts: np.ndarray, train_lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The training part of each user, cut from its beginning into disjoint stretches of at most seq_len."""
    pieces = -(-train_lengths // seq_len)
    user = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(user)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    segments = np.empty(len(user), SEGMENT)
    segments["start"] = starts[user] + piece * seq_len
    segments["user"] = user
    segments["length"] = np.minimum(train_lengths[user] - piece * seq_len, seq_len)
    segments["first_target"] = 1
    return segments[segments["length"] > 1]  # one event alone predicts nothing and helps nobody


def validation_segments(starts: np.ndarray, lengths: np.ndarray, train_lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Stretches that hold validation targets, cut from each user's end so that these see most history."""
    held_out = lengths - train_lengths
    pieces = np.where(held_out > 0, -(-held_out // seq_len), 0)
    user = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(user)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    end = lengths[user] - piece * seq_len
    begin = np.maximum(end - seq_len, 0)
    segments = np.empty(len(user), SEGMENT)
    segments["start"] = starts[user] + begin
    segments["user"] = user
    segments["length"] = end - begin
    segments["first_target"] = np.maximum(train_lengths[user] - begin, 1)
    return segments[segments["first_target"] < segments["length"]]


def pack(segments: np.ndarray, seq_len: int) -> Windows:
    """Segments put into windows, best fit first, longest segments first.

    All segments of one length are placed at once, so the work grows with seq_len² and not with the number
    of users. The result depends on nothing but the segments.
    """
    lengths = segments["length"].astype(np.int64)
    order = np.argsort(-lengths, kind="stable")
    window_of = np.empty(len(segments), np.int64)
    open_windows: dict[int, list[np.ndarray]] = {}  # free slots -> windows
    num_windows = 0
    ends = np.cumsum(np.bincount(lengths, minlength=seq_len + 1)[::-1])
    for length in range(seq_len, 0, -1):
        place = seq_len - length
        waiting = order[ends[place - 1] if place else 0 : ends[place]]
        while len(waiting):
            room = min((free for free in open_windows if free >= length), default=None)
            if room is None:
                fresh = -(-len(waiting) // (seq_len // length))
                chosen = np.arange(num_windows, num_windows + fresh)
                num_windows += fresh
                room = seq_len
            else:
                chosen = np.concatenate(open_windows.pop(room))
            taken, spare = chosen[: len(waiting)], chosen[len(waiting) :]
            window_of[waiting[: len(taken)]] = taken
            waiting = waiting[len(taken) :]
            if len(spare):
                open_windows.setdefault(room, []).append(spare)
            if room > length:
                open_windows.setdefault(room - length, []).append(taken)
    by_window = np.argsort(window_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=num_windows))]).astype(np.int64)
    return Windows(segments[by_window], offsets)
