"""What a dataset hands to training: windows of events, and the features of items.

Letters of the shapes: B windows, L slots per window, S segments per window at most, n items, T text tokens.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """B windows of L slots. A window holds one or more segments, each a stretch of one user's history."""

    items: np.ndarray  # int64 [B, L]: catalogue rows; 0 in empty slots
    targets: np.ndarray  # int64 [B, L]: the same user's next item in this window; -1 where that is no target
    positions: np.ndarray  # int32 [B, L]: place in the segment, from 0
    segments: np.ndarray  # int32 [B, L]: number of the segment in its window, from 0; -1 in empty slots
    boundaries: np.ndarray  # int32 [B·(S+1)+1]: where segments begin in the B·L flat slots; the empty tail of a
    # window counts as a segment, and the last entry, B·L, is repeated to the fixed length
    users: np.ndarray  # int64 [B, S]: the user of each segment; -1 beyond the last
    fields: dict[str, np.ndarray]  # [B, L]: codes of categories (int32), numbers (float32, NaN where missing)
    target_weights: np.ndarray | None = None  # float32 [B, L]: of the target; None: all count the same


@dataclass(frozen=True)
class ItemFeatures:
    """The encoded fields of n items."""

    tokens: np.ndarray | None  # int32 [n, T]: 0 is padding, at the end; None where no field is text
    fields: dict[str, np.ndarray]  # codes int32 [n], numbers float32 [n], vectors float32 [n, size]; NaN: missing;
    # of categories, codes int32 [n, width] with zeros after the last
