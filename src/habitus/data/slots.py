"""Where the segments of windows lie in the slots of a batch: every slot belongs to one, empty tails included."""

from typing import NamedTuple

import numpy as np

from habitus.data.windows import SEGMENT, Windows


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
        return np.arange(int(self.lengths.sum())) + np.repeat(self.starts - self.begin, self.lengths)


class SegmentTable(NamedTuple):
    """The segments of a split, the empty tail of a window among them, as contiguous columns."""

    first: np.ndarray  # [W]: first segment of each window
    counts: np.ndarray  # [W]
    start: np.ndarray
    length: np.ndarray
    first_target: np.ndarray
    user: np.ndarray  # -1 for an empty tail

    def layout(self, windows: np.ndarray) -> SlotLayout:
        counts = self.counts[windows]
        before = np.cumsum(counts) - counts
        within = np.arange(int(counts.sum())) - np.repeat(before, counts)
        chosen = np.repeat(self.first[windows], counts) + within
        lengths = self.length[chosen]
        return SlotLayout(
            windows=np.repeat(np.arange(len(windows)), counts),
            within=within,
            lengths=lengths,
            begin=np.cumsum(lengths) - lengths,
            starts=self.start[chosen],
            first_target=self.first_target[chosen],
            users=self.user[chosen],
        )


def segment_table(windows: Windows, seq_len: int) -> SegmentTable:
    """The segments of windows of `seq_len` slots, with a segment for every empty tail."""
    segments, offsets = windows
    if len(offsets) == 1:
        return SegmentTable(*(np.empty(0, np.int64) for _ in range(6)))
    filled = np.add.reduceat(segments["length"].astype(np.int64), offsets[:-1])
    short = np.flatnonzero(filled < seq_len)
    tails = np.zeros(len(short), SEGMENT)
    tails["user"] = -1
    tails["length"] = seq_len - filled[short]
    segments = np.insert(segments, offsets[short + 1], tails)
    counts = np.diff(offsets)
    counts[short] += 1
    return SegmentTable(
        np.cumsum(counts) - counts,
        counts,
        segments["start"].copy(),
        segments["length"].astype(np.int64),
        segments["first_target"].copy(),
        segments["user"].copy(),
    )
