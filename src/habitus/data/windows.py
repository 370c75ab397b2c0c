"""Windows of events: histories cut at seq_len, short ones packed several to a window.

A segment is a stretch of one user's events that attention may look across. A window is seq_len slots that hold
one or more segments and, at its end, perhaps empty slots. Windows are not stored: they follow from where each user's
parts end, and are cut when a dataset is opened.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from habitus.data.targets import TargetRows
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.store import SplitName

MAX_SEQ_LEN = 1 << 20  # packing keeps a count of segments of every length

# start: first event of the segment; first_target: offset from which its events count as targets.
SEGMENT = np.dtype([("start", "<i8"), ("user", "<i8"), ("length", "<i4"), ("first_target", "<i4")])


class Windows(NamedTuple):
    """Segments in window order; window w holds segments[offsets[w]:offsets[w + 1]]."""

    segments: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class UserParts:
    """Where each user's events are: training events first, then validation events, then test events."""

    starts: np.ndarray  # int64 [U]: first event
    lengths: np.ndarray  # int64 [U]
    train_lengths: np.ndarray  # int64 [U]
    validation_lengths: np.ndarray | None  # int64 [U]; None: there is no test side
    targets: TargetRows | None = None  # None: every event is a target

    def part(self, side: SplitName) -> tuple[np.ndarray, np.ndarray]:
        """Where the side's events begin and end, in each user's history."""
        validation_end = (
            self.lengths if self.validation_lengths is None else self.train_lengths + self.validation_lengths
        )
        if side == "train":
            return np.zeros_like(self.train_lengths), self.train_lengths
        return (self.train_lengths, validation_end) if side == "validation" else (validation_end, self.lengths)

    def segments(self, side: SplitName, seq_len: int) -> np.ndarray:
        """The side's segments. Training histories are cut from the beginning, held-out ones from the end."""
        begins, ends = self.part(side)
        if self.targets is not None:
            ends = self.targets.last_before(side, self.starts + begins, self.starts + ends) - self.starts
        if side == "train":
            segments = training_segments(self.starts, ends, seq_len)
        else:
            segments = held_out_segments(self.starts, begins, ends, seq_len)
        return segments if self.targets is None else self.targets.trim(side, segments)

    def count_queries(self, side: SplitName, segments: np.ndarray) -> np.ndarray:
        """How many events of each segment are predicted, int64."""
        if self.targets is not None:
            return self.targets.count(side, segments)
        return segments["length"].astype(np.int64) - segments["first_target"]

    def with_validation(self) -> "UserParts":
        """The same with the validation events among the training events."""
        _, ends = self.part("validation")
        return replace(self, train_lengths=ends, validation_lengths=np.zeros_like(ends))

    def training_share(self, share: float, part: int) -> "UserParts":
        """The same with the training events of a share of the training users alone.

        Training users stand in a pseudo-random line that depends on nothing but their number. A part is a stretch of
        it: parts of one share are disjoint and equally long, and the first part of a smaller share lies within that of
        a larger one.
        """
        users = np.flatnonzero(self.train_lengths)
        line = permute_index(np.arange(len(users)), len(users), shuffle_keys(0, Stream.USERS, 0))
        begin, end = (round(len(users) * share * number) for number in (part, part + 1))
        chosen = users[(line >= begin) & (line < end)]
        train_lengths = np.zeros_like(self.train_lengths)
        train_lengths[chosen] = self.train_lengths[chosen]
        return replace(self, train_lengths=train_lengths)

    def num_covered(self, side: SplitName, segments: np.ndarray) -> int:
        """How many of the side's events stand in its segments, which may hold earlier events too, as context."""
        begins, _ = self.part(side)
        first = self.starts[segments["user"]] + begins[segments["user"]]
        ends = segments["start"] + segments["length"]
        return int(np.maximum(ends - np.maximum(segments["start"], first), 0).sum())


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


def held_out_segments(starts: np.ndarray, begins: np.ndarray, ends: np.ndarray, seq_len: int) -> np.ndarray:
    """Stretches that hold the events begins..ends of each history as targets, cut from the end, so that these see
    most of what came before them."""
    pieces = -(-(ends - begins) // seq_len)
    user = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(user)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    end = ends[user] - piece * seq_len
    begin = np.maximum(end - seq_len, 0)
    segments = np.empty(len(user), SEGMENT)
    segments["start"] = starts[user] + begin
    segments["user"] = user
    segments["length"] = end - begin
    segments["first_target"] = np.maximum(begins[user] - begin, 1)
    return segments[segments["first_target"] < segments["length"]]


def pack(segments: np.ndarray, seq_len: int) -> Windows:
    """Segments put into windows, best fit first, longest segments first.

    All segments of one length are placed at once, so the work in Python grows with seq_len and not with the number
    of users. The result depends on nothing but the segments.
    """
    lengths = segments["length"].astype(np.int64)
    # Radix sort, which NumPy has for 16 bits, is ten times faster; the order is the same.
    order = np.argsort((-lengths).astype(np.int16) if seq_len < 2**15 else -lengths, kind="stable")
    window_of = np.empty(len(segments), np.int64)
    open_windows: dict[int, list[np.ndarray]] = {}  # free slots -> windows
    rooms: list[int] = []  # its keys, sorted
    num_windows = 0
    ends = np.cumsum(np.bincount(lengths, minlength=seq_len + 1)[::-1])
    for length in range(seq_len, 0, -1):
        rank = seq_len - length
        waiting = order[ends[rank - 1] if rank else 0 : ends[rank]]
        while len(waiting):
            place = bisect_left(rooms, length)
            if place == len(rooms):
                fresh = -(-len(waiting) // (seq_len // length))
                chosen = np.arange(num_windows, num_windows + fresh)
                num_windows += fresh
                room = seq_len
            else:
                room = rooms.pop(place)
                chosen = np.concatenate(open_windows.pop(room))
            taken, spare = chosen[: len(waiting)], chosen[len(waiting) :]
            window_of[waiting[: len(taken)]] = taken
            waiting = waiting[len(taken) :]
            for free, freed in ((room, spare), (room - length, taken)):
                if free and len(freed):
                    if free not in open_windows:
                        insort(rooms, free)
                    open_windows.setdefault(free, []).append(freed)
    by_window = np.argsort(window_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=num_windows))]).astype(np.int64)
    return Windows(segments[by_window], offsets)
