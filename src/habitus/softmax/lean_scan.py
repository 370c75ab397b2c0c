"""The plain scan for processors, with a cheaper way to find the best candidates of a tile.

    R  queries of a batch      T  candidates of a tile      k  leaders kept per query

With a catalogue of tens of thousands of items, most tiles still bring newcomers to a list of a hundred, and finding
them costs as much as everything else together. numpy walks over a mask that is nearly all false eight bytes at a
time, and the first tile is cut to its own k best before any key is made.
"""

import numpy as np
import torch
from torch import Tensor

from habitus.softmax import leaders
from habitus.softmax.plain_scan import PlainScan

LOWEST = -5.0e29  # below every score, above the scan's mask for places beyond the last candidate


class LeanScan(PlainScan):
    """A PlainScan on the processor; the same sums, ranks and leaders to the bit."""

    reads_tops = False

    def __init__(
        self,
        queries: Tensor,
        target_rows: Tensor | None,
        target_bias: Tensor | None,
        k: int,
        columns: int,
        *,
        losses: bool = True,
    ) -> None:
        super().__init__(queries, target_rows, target_bias, k, columns, losses=losses)
        self.leading = torch.empty(self.scores.shape, dtype=torch.bool)

    def share_scratch(self, other: "LeanScan") -> None:
        """Write tiles where another scan does: scans take turns, and one tile stays in the processor's cache."""
        if self.scores.shape == other.scores.shape:
            self.scores, self.spare, self.tile = other.scores, other.spare, other.tile
            self.leading = other.leading

    def _find_leaders(self, z: Tensor, tops: Tensor, first_id: int) -> None:
        """Put aside the scores above their query's threshold."""
        assert self.best is not None
        threshold = self.threshold
        if bool((self.best[:, -1] == leaders.EMPTY).any()):
            # Places are free. Still, what is below the k-th of its own tile is below the k-th of all.
            worst = z.topk(min(self.best.shape[1], z.shape[1]), dim=1).values[:, -1]
            just_below = torch.nextafter(worst, torch.full_like(worst, -torch.inf))
            threshold = torch.maximum(threshold, just_below).clamp_min(LOWEST)
        found = np.flatnonzero(torch.gt(z, threshold[:, None], out=self.leading).numpy())
        if not len(found):
            return
        rows, columns = (torch.from_numpy(part) for part in np.divmod(found, z.shape[1]))
        scores = z.view(-1)[torch.from_numpy(found)]
        self.pending.append((rows, leaders.keys_of(scores.float(), first_id + columns)))
        self.num_pending += len(found)
        if self.num_pending > self.best.numel() // 2:
            self._settle()
