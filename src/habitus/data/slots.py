"""Where the segments of windows lie in the slots of a batch: every slot belongs to one, empty tails included."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from habitus.data.windows import SEGMENT, Windows

_FIRST_LINES = np.arange(4) * 64  # of a stretch of memory, in bytes; the processor fetches those after them itself


class SlotLayout(NamedTuple):
    """Segments of some windows one after the other, empty tails among them: they fill all slots."""

    windows: np.ndarray  # number of the segment's window in the batch
    within: np.ndarray  # number of the segment in its window
    lengths: np.ndarray
    begin: np.ndarray  # the slot at which each segment begins
    starts: np.ndarray  # its first row in the log
    first_target: np.ndarray
    users: np.ndarray  # -1 for an empty tail

    def rows(self) -> np.ndarray:
        """The row of the log behind every slot; anything in empty tails."""
        rows = np.repeat(self.starts - self.begin, self.lengths)
        rows += _count_up(len(rows), np.int64)
        return rows

    def positions(self) -> np.ndarray:
        """The place of every slot in its segment, from 0, int32."""
        begin = np.repeat(self.begin.astype(np.int32), self.lengths)
        return np.subtract(_count_up(len(begin), np.int32), begin, out=begin)

    def take(self, records: np.ndarray) -> np.ndarray:
        """The records of the log behind every slot; any in empty tails.

        Segments lie all over the log. The first lines of all are touched before the first is copied, so that the
        processor waits for them together and not for one after the other.
        """
        records.view(np.uint8).take((self.starts * records.itemsize)[:, None] + _FIRST_LINES, mode="clip")
        return records.take(self.rows(), mode="clip")  # an empty tail may be longer than the log


class SegmentTable(NamedTuple):
    """The segments of a split, the empty tail of a window among them.

    The windows of a batch stand anywhere in it, and what costs time is to look there. So what belongs together stands
    together: where a window's segments begin and end, and all that is known of a segment.
    """

    offsets: np.ndarray  # int64 [W + 1]: window w holds segments[offsets[w]:offsets[w + 1]]
    segments: np.ndarray  # SEGMENT; the user of an empty tail is -1
    has_context: bool  # whether any segment begins with events that are no targets, besides the first

    def layout(self, windows: np.ndarray) -> SlotLayout:
        first = self.offsets[windows]
        counts = self.offsets[windows + 1] - first
        ends = np.cumsum(counts)
        window = np.repeat(_count_up(len(windows), np.int64), counts)
        chosen = np.arange(len(window)) + (first - ends + counts)[window]
        segments = self.segments.take(chosen)
        lengths = segments["length"].astype(np.int64)
        return SlotLayout(
            windows=window,
            within=chosen - first[window],
            lengths=lengths,
            begin=np.cumsum(lengths) - lengths,
            starts=segments["start"],
            first_target=segments["first_target"],
            users=segments["user"],
        )


def segment_table(windows: Windows, seq_len: int) -> SegmentTable:
    """The segments of windows of `seq_len` slots, with a segment for every empty tail."""
    segments, offsets = windows
    if len(offsets) == 1:
        return SegmentTable(offsets, segments, False)
    filled = np.add.reduceat(segments["length"].astype(np.int64), offsets[:-1])
    short = np.flatnonzero(filled < seq_len)
    tails = np.zeros(len(short), SEGMENT)
    tails["user"] = -1
    tails["length"] = seq_len - filled[short]
    has_context = bool(segments["first_target"].max() > 1)
    counts = np.diff(offsets)
    counts[short] += 1
    return SegmentTable(
        np.concatenate([[0], np.cumsum(counts)]), np.insert(segments, offsets[short + 1], tails), has_context
    )


@lru_cache(maxsize=8)
def _count_up(stop: int, dtype: type) -> np.ndarray:
    """0, 1, ... as batches of one size need them again and again; not to be written to."""
    numbers: np.ndarray = np.arange(stop, dtype=dtype)
    numbers.flags.writeable = False
    return numbers
