"""The exact search: every candidate scored, the best kept, the log-sum-exp of all beside them.

    M  queries      V  candidates      d  width of a vector      k  items wanted per query

Among equal scores lower rows come first, as in evaluation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.softmax import CandidateTable, CpuScan, SoftmaxBackend, TorchScan, TritonScan, refusal_reason, topk

# Added to the score of a candidate that must not be found: far below every score, above the scans' own masks.
HIDDEN = -1.0e28
# One or a few queries leave a tile of CpuScan, which has 16 rows at least, mostly empty. On one core of an EPYC, a
# million candidates of width 64: 14 ms for one query against 136 ms; from nine queries on CpuScan is ahead.
NARROW = 8
NARROW_COLUMNS = 1 << 16
BLOCK_ROWS = 1 << 18


class ScanResult(NamedTuple):
    """Per query: the best scores and their rows, best first, -1 beyond the last; log-sum-exp over the candidates."""

    scores: Tensor  # float32 [M, k]
    rows: Tensor  # int64 [M, k]
    lse: Tensor  # float64 [M]


@torch.no_grad()
def exact_search(queries: Tensor, pieces: Sequence[Tensor], k: int, bias: Tensor | None = None) -> ScanResult:
    """The k best candidates of queries [M, d]; `pieces` are one table of any stored type, on any device.

    `bias` [V] on the queries' device is added to the scores; HIDDEN hides a candidate.
    """
    scan = _scan_for(queries, k)
    with torch.autocast(queries.device.type, enabled=False):
        first = 0
        for piece in pieces:
            for _, block in CandidateTable(piece).blocks(BLOCK_ROWS, queries.device):
                for at in range(0, len(block), BLOCK_ROWS):  # what is on the device comes as one block
                    part = block[at : at + BLOCK_ROWS].to(queries.dtype)
                    scan.update(part, None if bias is None else bias[first : first + len(part)], first)
                    first += len(part)
    keys = scan.topk_keys()
    assert keys is not None
    scores, rows = topk.decode_scores(keys), topk.decode_ids(keys)
    gone = (keys == topk.EMPTY) | (scores < HIDDEN / 2)
    sums = scan.sums()
    lse = sums.top.double() + sums.total.double().log()
    return ScanResult(scores.masked_fill(gone, -torch.inf), rows.masked_fill(gone, -1), lse)


def _scan_for(queries: Tensor, k: int) -> "NarrowScan | TorchScan | TritonScan":
    if queries.device.type == "cpu":
        if len(queries) <= NARROW:
            return NarrowScan(queries, k)
        return CpuScan(queries, None, None, k, 1 << 14 if len(queries) <= 64 else 1 << 12)
    if not refusal_reason(SoftmaxBackend.TRITON, queries.device, queries.dtype, queries.shape[1], False):
        return TritonScan(queries, None, None, k)
    return TorchScan(queries, None, None, k, 1 << 14)


class _NarrowSums(NamedTuple):
    top: Tensor
    total: Tensor


class NarrowScan:
    """A scan for few queries on a processor: plain products, and keys only for scores above the threshold."""

    def __init__(self, queries: Tensor, k: int) -> None:
        self.queries = queries
        self.best = topk.empty_topk(len(queries), k, queries.device)
        self.threshold = queries.new_full((len(queries),), -torch.inf)
        self.top = queries.new_full((len(queries),), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros_like(self.top)

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Take in the next candidates, whose ids start at `first_id`."""
        for at in range(0, len(block), NARROW_COLUMNS):
            z = self.queries @ block[at : at + NARROW_COLUMNS].T
            if bias is not None:
                z += bias[at : at + NARROW_COLUMNS]
            self._lead(z, first_id + at)
            self._add(z)

    def topk_keys(self) -> Tensor:
        """The keys [M, k] of the best candidates so far, best first."""
        return self.best

    def sums(self) -> _NarrowSums:
        """(top, total) with log-sum-exp = top + log(total), float64."""
        return _NarrowSums(self.top, self.total)

    def _lead(self, z: Tensor, first_id: int) -> None:
        k = self.best.shape[1]
        threshold = self.threshold
        if bool(threshold.isinf().any()):  # while places are free: what is below the tile's own k-th never leads
            worst = z.topk(min(k, z.shape[1]), dim=1).values[:, -1]
            threshold = torch.maximum(threshold, torch.nextafter(worst, torch.full_like(worst, -torch.inf)))
        rows, columns = (z > threshold[:, None]).nonzero(as_tuple=True)
        if len(rows):
            self.best = topk.merge_topk_pairs(self.best, rows, topk.encode_keys(z[rows, columns], first_id + columns))
            self.threshold = topk.thresholds(self.best)

    def _add(self, z: Tensor) -> None:
        top = torch.maximum(self.top, z.amax(1).double())
        self.total *= (self.top - top).exp()
        self.total += z.sub_(top.float()[:, None]).exp_().sum(1)
        self.top = top
