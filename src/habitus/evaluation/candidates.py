"""Loss, entropy, rank and top items of queries over candidates that may be sharded over processes.

    M  queries      V  candidates of all processes      d  width of a vector      k  items per query

`habitus.softmax.CandidateScan` does the work on each process's own rows. Its results add up exactly (counts, best keys)
or in float64 (sums of exponentials), so that neither the number of processes nor the blocks in which rows come can be
seen in a rank, and in a loss only far below 1e-6. Losses are therefore computed in float64 here.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.evaluation.copy_scores import PastScores
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import Scores
from habitus.softmax import MEMORY_BYTES, CandidateScan, CandidateTable, Sums, has_nonfinite, merge_sums, topk


class Candidates(NamedTuple):
    """This process's rows of the candidates, and where they stand among all of them."""

    pieces: list[Tensor]  # consecutive rows [.., d], on any device and of any stored type
    first: int  # place of the first of them
    total: int  # V


@torch.no_grad()
def candidate_scores(
    queries: Tensor,
    candidates: Candidates,
    target_rows: Tensor,
    k: int,
    *,
    ranks: Ranks,
    memory_bytes: int = MEMORY_BYTES,
    losses: bool = True,
    past: PastScores | None = None,
) -> Scores:
    """Scores of queries [M, d] over all candidates; `top` holds places among them, -1 beyond the last.

    With k = 0 there are no lists, and without `losses` neither loss nor entropy: each is a good part of the work.
    `target_rows` [M, d] are the vectors of the targets, which must stand among the candidates with the same bits.
    `past` holds what copying adds to the items of each query's own past.
    Working memory stays near `memory_bytes`, whatever M and V are.
    """
    _check(queries, target_rows)
    width = min(k, candidates.total)
    scan = CandidateScan(
        queries,
        width,
        target_rows=target_rows,
        target_bias=None if past is None else past.target_bias,
        losses=losses,
        memory_bytes=memory_bytes,
    )
    if any(len(piece) for piece in candidates.pieces):  # there may be more processes than candidates
        scan.scan_table(CandidateTable(candidates.pieces), first_id=candidates.first)
    sums, keys = _merge_processes(scan, ranks)
    target_scores = scan.target_scores().double()
    if past is not None:
        sums, keys = past.adjust_sums(sums), past.adjust_topk(keys)
        target_scores = target_scores - past.target_bias + past.target_gain
    top = topk.decode_ids(keys).cpu().numpy()
    log_total = sums.total.log()
    log_probs = topk.decode_scores(keys).double() - (sums.top + log_total)[:, None]
    return Scores(
        loss=(sums.top + log_total - target_scores).cpu().numpy() if losses else None,
        entropy=(log_total - sums.dot / sums.total).clamp_min(0).cpu().numpy() if losses else None,
        rank=sums.reached.long().cpu().numpy(),
        top=np.pad(top, ((0, 0), (0, k - width)), constant_values=-1),
        top_log_probs=np.pad(log_probs.cpu().numpy(), ((0, 0), (0, k - width)), constant_values=-np.inf)
        if losses
        else None,
    )


def _merge_processes(scan: CandidateScan, ranks: Ranks) -> tuple[Sums, Tensor]:
    """Sums over the candidates of all processes, in float64, and the keys of the best of them."""
    sums_by_process = torch.stack(ranks.gather(torch.stack(_own_sums(scan))), 1)  # [4, W, M]
    keys = ranks.gather(scan.topk_keys())
    best = keys[0] if len(keys) == 1 else topk.merge_topk(keys[0], torch.cat(keys[1:], 1))
    return merge_sums(Sums(*sums_by_process)), best


def _own_sums(scan: CandidateScan) -> Sums:
    """A scan's sums in float64; a process without rows adds nothing, at the level of the target's score."""
    if not scan.started:
        target_scores = scan.target_scores().double()
        zero = torch.zeros_like(target_scores)
        return Sums(target_scores, zero, zero, zero)
    top, total, dot, reached = scan.sums()
    return Sums(top.double(), total.double(), dot.double(), reached.double())


def _check(queries: Tensor, target_rows: Tensor) -> None:
    if queries.shape != target_rows.shape or queries.dtype != target_rows.dtype or len(queries) == 0:
        raise ModelError(
            f"queries are {tuple(queries.shape)} of {queries.dtype}, "
            f"vectors of targets {tuple(target_rows.shape)} of {target_rows.dtype}",
            expected="one vector per query, of one width and type, and at least one query",
        )
    if bool(has_nonfinite(queries)):
        raise ModelError("the queries hold NaN or infinity", next_step="check the run: did its training diverge?")
