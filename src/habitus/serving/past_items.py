"""What a user's own past says for itself when items are recommended: scored beside what the index finds.

n  distinct items of a history
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from habitus.model import MASKED_COPY_SCORE


class Past(NamedTuple):
    """The items of one history, each once, and the logarithm of what their events add to the item's exponential."""

    rows: np.ndarray  # int64 [n], rising
    added: np.ndarray  # float64 [n]


NO_PAST = Past(np.empty(0, np.int64), np.empty(0))


def pasts(copying: Tensor | None, items: np.ndarray, windows: np.ndarray, slots: np.ndarray) -> list[Past]:
    """The past of every history of a batch, given by window and slot of its last event; nothing where none is heard.

    `copying` [B, L, L] is the model's, `items` [B, L] the rows of the batch's events.
    """
    if copying is None:
        return [NO_PAST] * len(windows)
    said = copying[windows, slots].double().cpu().numpy()
    found = []
    for window, weights in zip(windows.tolist(), said, strict=True):
        seen = weights > MASKED_COPY_SCORE / 2
        rows, place = np.unique(items[window][seen], return_inverse=True)
        added = np.full(len(rows), -np.inf)
        np.logaddexp.at(added, place, weights[seen])
        found.append(Past(rows, added))
    return found
