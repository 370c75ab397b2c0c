"""The exact search: every candidate scored, the best kept, with the log-sum-exp of all of them.

    M  queries      V  candidates      d  width of a vector      k  items per query

Among equal scores lower rows come first, as in evaluation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.softmax import CandidateScan, CandidateTable, topk

# Added to the score of a candidate that must not be found: far below every score, above the scans' own masks.
HIDDEN = -1.0e28
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
    scan = CandidateScan.for_search(queries, k)
    first = 0
    for piece in pieces:
        part = None if bias is None else bias[first : first + len(piece)]
        # Checking all rows at every request would cost about as much as scoring them.
        scan.scan_table(CandidateTable(piece), bias=part, first_id=first, block_rows=BLOCK_ROWS, check=False)
        first += len(piece)
    keys = scan.topk_keys()
    scores, rows = topk.decode_scores(keys), topk.decode_ids(keys)
    gone = (keys == topk.EMPTY) | (scores < HIDDEN / 2)
    return ScanResult(scores.masked_fill(gone, -torch.inf), rows.masked_fill(gone, -1), scan.lse())
