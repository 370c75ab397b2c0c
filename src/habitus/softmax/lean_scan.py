"""The plain scan for processors, with a cheaper way to find the best candidates.

    R  queries of a batch      T  candidates of a tile      k  leaders kept per query      N  candidates of a block

Three things make it cheap. A sample of the first block says beforehand which score will be among the k best or
somewhat below, so that a few hundred candidates are put aside instead of all that lead for a while. numpy compares a
tile and walks over the mask, which is nearly all false, eight places at a time. And what is found goes to its query's
own row of a buffer, where it is sorted once. Should the sample have promised too much, so that some query has fewer
than k, the block is passed over again for that query: the result is the full sort's, whatever the order of scores.
"""

import math

import numpy as np
import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.plain_scan import PlainScan

LOWEST = -5.0e29  # below every score, above the scan's mask for places beyond the last candidate
EIGHT = 8
SAMPLED_TILES = 16  # a block of fewer tiles is not sampled, and a sample is at most this part of a block


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
        self.threshold[self.num_queries :] = torch.inf  # rows of padding have no leaders
        self.num_seen = 0
        self.sampled = False
        self.fill = np.zeros(len(self.scores), np.int64)
        if k:
            self.leading = np.empty(self.scores.shape, bool)
            # A row per query, wide enough for all that one tile can bring.
            self.aside = np.empty(self.scores.shape, np.int64)

    def share_scratch(self, other: "LeanScan") -> None:
        """Write tiles where another scan does: scans take turns, and one tile stays in the processor's cache."""
        if self.scores.shape == other.scores.shape:
            self.scores, self.spare, self.tile = other.scores, other.spare, other.tile
            if self.best is not None:
                self.leading, self.aside = other.leading, other.aside

    def see(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Take in the next candidates, whose ids start at `first_id`."""
        if self.best is None:
            return super().see(block, bias, first_id)
        if self.num_seen == 0:
            self._sample(block, bias)
        super().see(block, bias, first_id)
        self._settle()
        self.num_seen += len(block)
        if self.sampled:
            self._make_up(block, bias, first_id)
        return None

    def _sample(self, block: Tensor, bias: Tensor | None) -> None:
        """Set thresholds that leave somewhat more than k candidates, judged by an even sample of the block."""
        assert self.best is not None
        k, N = self.best.shape[1], len(block)
        tiles = min(N // (SAMPLED_TILES * self.columns), -(-8 * N // (k * self.columns)))
        size = tiles * self.columns
        expected = k * size / N if N else 0.0
        # Five deviations more than expected: a query that still ends with fewer than k is one in millions.
        place = math.ceil(expected + 5 * math.sqrt(expected) + 5)
        if tiles == 0 or place > size // EIGHT:
            return
        chosen = torch.arange(size) * (N // size)
        maxima = []
        for start in range(0, size, self.columns):
            rows = chosen[start : start + self.columns]
            z = self._scores(block[rows], None if bias is None else bias[rows])
            # Neighbours, which may be alike, are in different groups of eight.
            maxima.append(z.view(len(z), EIGHT, -1).amax(1))
        # The best of a sample hardly ever share a group, and where they do the threshold is only lower.
        worst = torch.cat(maxima, 1).topk(place, dim=1).values[:, -1]
        self.threshold = torch.maximum(self.threshold, _just_below(worst).clamp_min(LOWEST))
        self.sampled = True

    def _make_up(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Pass over the block again for queries of which the sample promised too much."""
        assert self.best is not None
        self.sampled = False
        short = self.best[:, min(self.best.shape[1], self.num_seen) - 1] == topk.EMPTY
        short[self.num_queries :] = False
        if not bool(short.any()):
            return
        self.best[short] = topk.EMPTY
        kept = self.threshold
        self.threshold = torch.where(short, LOWEST, torch.inf).to(self.dtype)
        for start in range(0, len(block), self.columns):
            z = self._scores(
                block[start : start + self.columns], None if bias is None else bias[start : start + self.columns]
            )
            self._find_leaders(z, z, first_id + start)
        self._settle()
        self.threshold = torch.where(short, self.threshold, kept)

    def _find_leaders(self, z: Tensor, tops: Tensor, first_id: int) -> None:
        """Put aside the scores above their query's threshold."""
        assert self.best is not None
        threshold = self.threshold
        if not self.sampled and bool((self.best[: self.num_queries, -1] == topk.EMPTY).any()):
            # Places are free. Still, what is below the k-th of its own tile is below the k-th of all.
            worst = z.topk(min(self.best.shape[1], z.shape[1]), dim=1).values[:, -1]
            threshold = torch.maximum(threshold, _just_below(worst)).clamp_min(LOWEST)
        np.greater(z.numpy(), threshold[:, None].numpy(), out=self.leading)
        found = _places(self.leading)
        if not len(found):
            return
        rows = found // z.shape[1]
        counts = np.bincount(rows, minlength=len(z))
        if (self.fill + counts).max() > self.aside.shape[1]:
            self._settle()
        scores, ids = torch.from_numpy(z.numpy().ravel()[found]), torch.from_numpy(found - rows * z.shape[1] + first_id)
        # Places come row by row, so the first of a row is after all of the rows before.
        before = np.cumsum(counts) - counts
        self.aside[rows, np.arange(len(found)) + (self.fill - before)[rows]] = topk.keys_of(scores.float(), ids).numpy()
        self.fill += counts

    def _settle(self) -> None:
        """Merge what was put aside and raise the thresholds."""
        most = int(self.fill.max())
        if self.best is None or most == 0:
            return
        keys = torch.from_numpy(np.where(np.arange(most) < self.fill[:, None], self.aside[:, :most], topk.EMPTY))
        self.best = topk.merge_leaders(self.best, keys)
        self.threshold = torch.maximum(self.threshold, topk.thresholds(self.best).to(self.dtype))
        self.fill[:] = 0


def _just_below(scores: Tensor) -> Tensor:
    return torch.nextafter(scores, torch.full_like(scores, -torch.inf))


def _places(mask: np.ndarray) -> np.ndarray:
    """The places of what is true in the flattened mask, whose rows are a multiple of eight long."""
    eights = mask.reshape(-1).view(np.int64)
    some = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[some].view(bool))
    return some[inside >> 3] * 8 + (inside & 7)
