"""Scans over candidates on a CPU: `TorchScan` with a cheaper top-k, and one for few queries.

    R  queries of a batch      T  candidates of a tile      k  candidates kept per query      N  candidates of a block

Three things make the top-k cheap. A sample of the first block estimates a threshold somewhat below the k-th best score,
so that a few hundred candidates are collected instead of all that are among the best for a while. numpy compares a tile
and walks over the mask, which is nearly all false, eight places at a time. And candidates go to their query's own row
of a buffer, where they are sorted once. Should the threshold be too high, so that some query has fewer than k, the
block is scanned again for that query: the result is that of a full sort, whatever the order of scores.
"""

import math

import numpy as np
import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.tiles import Sums
from habitus.softmax.torch_scan import TorchScan

FEW_QUERIES = 8  # from one more on, CpuScan is faster than FewQueriesScan
_FEW_QUERIES_COLUMNS = 1 << 16
_LOWEST = -5.0e29  # below every score, above the scan's mask for places beyond the last candidate
_GROUPS = 8  # of a sampled tile: only the best of each counts
_SAMPLED_TILES = 16  # a block of fewer tiles is not sampled, and a sample is at most this part of a block


class CpuScan(TorchScan):
    """A TorchScan on a CPU; the same sums, ranks and top-k to the bit."""

    collects_by_group = False

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
        self.threshold[self.num_queries :] = torch.inf  # rows of padding collect nothing
        self.num_scanned = 0
        self.sampled = False
        self.fill = np.zeros(len(self.scores), np.int64)
        if k:
            self.above = np.empty(self.scores.shape, bool)
            # A row per query, wide enough for all of a tile.
            self.collected = np.empty(self.scores.shape, np.int64)

    def share_scratch(self, other: "CpuScan") -> None:
        """Write tiles where another scan does: scans run one after the other, and one tile stays in the cache."""
        if self.scores.shape == other.scores.shape:
            self.scores, self.scratch, self.tile = other.scores, other.scratch, other.tile
            if self.best is not None:
                self.above, self.collected = other.above, other.collected

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the next candidates, whose ids start at `first_id`."""
        if self.best is None:
            return super().update(block, bias, first_id)
        if self.num_scanned == 0:
            self._set_thresholds(block, bias)
        super().update(block, bias, first_id)
        self._merge_pending()
        self.num_scanned += len(block)
        if self.sampled:
            self._rescan_short(block, bias, first_id)
        return None

    def _set_thresholds(self, block: Tensor, bias: Tensor | None) -> None:
        """Set thresholds that leave somewhat more than k candidates, estimated from an even sample of the block."""
        assert self.best is not None
        k, N = self.best.shape[1], len(block)
        tiles = min(N // (_SAMPLED_TILES * self.columns), -(-8 * N // (k * self.columns)))
        size = tiles * self.columns
        expected = k * size / N if N else 0.0
        # Five deviations more than expected: a query that still ends with fewer than k is one in millions.
        place = math.ceil(expected + 5 * math.sqrt(expected) + 5)
        if tiles == 0 or place > size // _GROUPS:
            return
        sample = torch.arange(size) * (N // size)
        maxima = []
        for start in range(0, size, self.columns):
            rows = sample[start : start + self.columns]
            z = self._scores(block[rows], None if bias is None else bias[rows])
            # Neighbours, which may be alike, are in different groups of eight.
            maxima.append(z.view(len(z), _GROUPS, -1).amax(1))
        # The best of a sample hardly ever share a group, and where they do the threshold is only lower.
        worst = torch.cat(maxima, 1).topk(place, dim=1).values[:, -1]
        self.threshold = torch.maximum(self.threshold, _just_below(worst).clamp_min(_LOWEST))
        self.sampled = True

    def _rescan_short(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the block again for queries whose threshold was too high."""
        assert self.best is not None
        self.sampled = False
        short = self.best[:, min(self.best.shape[1], self.num_scanned) - 1] == topk.EMPTY
        short[self.num_queries :] = False
        if not bool(short.any()):
            return
        self.best[short] = topk.EMPTY
        thresholds = self.threshold
        self.threshold = torch.where(short, _LOWEST, torch.inf).to(self.dtype)
        for start in range(0, len(block), self.columns):
            z = self._scores(
                block[start : start + self.columns], None if bias is None else bias[start : start + self.columns]
            )
            self._collect(z, z, first_id + start)
        self._merge_pending()
        self.threshold = torch.where(short, self.threshold, thresholds)

    def _collect(self, z: Tensor, group_max: Tensor, first_id: int) -> None:
        """Collect the scores above their query's threshold."""
        assert self.best is not None
        threshold = self.threshold
        if not self.sampled and bool((self.best[: self.num_queries, -1] == topk.EMPTY).any()):
            # Fewer than k so far. Still, what is below the k-th of its own tile is below the k-th of all.
            worst = z.topk(min(self.best.shape[1], z.shape[1]), dim=1).values[:, -1]
            threshold = torch.maximum(threshold, _just_below(worst)).clamp_min(_LOWEST)
        np.greater(z.numpy(), threshold[:, None].numpy(), out=self.above)
        places = _places(self.above)
        if not len(places):
            return
        rows = places // z.shape[1]
        counts = np.bincount(rows, minlength=len(z))
        if (self.fill + counts).max() > self.collected.shape[1]:
            self._merge_pending()
        scores = torch.from_numpy(z.numpy().ravel()[places])
        ids = torch.from_numpy(places - rows * z.shape[1] + first_id)
        # Places come row by row, so the first of a row is after all of the rows before.
        before = np.cumsum(counts) - counts
        slots = np.arange(len(places)) + (self.fill - before)[rows]
        self.collected[rows, slots] = topk.encode_keys(scores.float(), ids).numpy()
        self.fill += counts

    def _merge_pending(self) -> None:
        """Merge what was collected and raise the thresholds."""
        most = int(self.fill.max())
        if self.best is None or most == 0:
            return
        keys = torch.from_numpy(np.where(np.arange(most) < self.fill[:, None], self.collected[:, :most], topk.EMPTY))
        self.best = topk.merge_topk(self.best, keys)
        self.threshold = torch.maximum(self.threshold, topk.thresholds(self.best).to(self.dtype))
        self.fill[:] = 0


class FewQueriesScan:
    """A scan for few queries without targets: plain products, and keys only for scores above the threshold.

    A tile of `CpuScan` has 16 rows at least, which few queries leave mostly empty. On one core of an EPYC, a million
    candidates of width 64: 14 ms for one query against 136 ms; from nine queries on `CpuScan` is ahead.
    """

    def __init__(self, queries: Tensor, k: int) -> None:
        self.queries = queries
        self.best = topk.empty_topk(len(queries), k, queries.device)
        self.threshold = queries.new_full((len(queries),), -torch.inf)
        self.top = queries.new_full((len(queries),), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros_like(self.top)

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the next candidates, whose ids start at `first_id`."""
        for start in range(0, len(block), _FEW_QUERIES_COLUMNS):
            z = self.queries @ block[start : start + _FEW_QUERIES_COLUMNS].T
            if bias is not None:
                z += bias[start : start + _FEW_QUERIES_COLUMNS]
            self._collect(z, first_id + start)
            self._add_exponentials(z)

    def sums(self) -> Sums:
        """The sums of exponentials so far, float64; the others are not computed and zero."""
        zero = torch.zeros_like(self.total)
        return Sums(self.top, self.total, zero, zero)

    def topk_keys(self) -> Tensor:
        """The keys [M, k] of the best candidates so far, best first."""
        return self.best

    def target_scores(self) -> None:
        """There are no targets."""

    def _collect(self, z: Tensor, first_id: int) -> None:
        k = self.best.shape[1]
        threshold = self.threshold
        if bool(
            threshold.isinf().any()
        ):  # fewer than k so far: what is below the tile's own k-th is not among the k best
            worst = z.topk(min(k, z.shape[1]), dim=1).values[:, -1]
            threshold = torch.maximum(threshold, _just_below(worst))
        rows, columns = (z > threshold[:, None]).nonzero(as_tuple=True)
        if len(rows):
            self.best = topk.merge_topk_pairs(self.best, rows, topk.encode_keys(z[rows, columns], first_id + columns))
            self.threshold = topk.thresholds(self.best)

    def _add_exponentials(self, z: Tensor) -> None:
        top = torch.maximum(self.top, z.amax(1).double())
        self.total *= (self.top - top).exp()
        self.total += z.sub_(top.float()[:, None]).exp_().sum(1)
        self.top = top


def _just_below(scores: Tensor) -> Tensor:
    return torch.nextafter(scores, torch.full_like(scores, -torch.inf))


def _places(mask: np.ndarray) -> np.ndarray:
    """The places of what is true in the flattened mask, whose rows are a multiple of eight long."""
    eights = mask.reshape(-1).view(np.int64)
    some = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[some].view(bool))
    return some[inside >> 3] * 8 + (inside & 7)
