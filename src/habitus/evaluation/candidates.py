"""Loss, entropy, rank and top items of queries over candidates that may be spread over processes.

    M  queries      V  candidates of all processes      d  width of a vector      k  items wanted per query

The scans of `habitus.softmax` do the work on each process's own rows. What they leave behind adds up exactly (counts,
best keys) or in float64 (sums of exponentials), so that neither the number of processes nor the blocks in which rows
come can be seen in a rank, and in a loss only far below 1e-6. Losses are therefore taken in float64 here.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.evaluation.copy_scores import Past
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import Scores
from habitus.softmax import (
    SCAN_GROUP,
    CandidateTable,
    CpuScan,
    SoftmaxBackend,
    Sums,
    TorchScan,
    TritonScan,
    buffer_slots,
    check_scale,
    has_nonfinite,
    max_abs,
    merge_sums,
    refusal_reason,
    topk,
)

MEMORY_BYTES = 512 << 20
# Queries per batch and candidates per tile outside the tile kernels; benchmarks/evaluate.py on one core of an EPYC:
# 1.33 s for these, 1.49 s for 256 by 2,048.
PLAIN_ROWS = 1024
PLAIN_COLUMNS = 1024


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
    past: Past | None = None,
) -> Scores:
    """Scores of queries [M, d] over all candidates; `top` holds places among them, -1 beyond the last.

    With k = 0 there are no lists, and without `losses` neither loss nor entropy: each is a good part of the work.
    `target_rows` [M, d] are the vectors of the targets, which must stand among the candidates with the same bits.
    `past` is what the queries' own past adds, where it is heard.
    Working memory stays near `memory_bytes`, whatever M and V are.
    """
    _check(queries, target_rows)
    width = min(k, candidates.total)
    bias = None if past is None else past.target_bias
    scans = _begin(queries, target_rows, bias, width, memory_bytes, losses)
    with torch.autocast(queries.device.type, enabled=False):
        for start, block in _blocks(candidates, queries, memory_bytes):
            for scan in scans:
                scan.update(block, None, start)
    parts = [_merged(scan, ranks) for scan in scans]
    sums = Sums(*(torch.cat(column) for column in zip(*(sums for sums, _, _ in parts), strict=True)))
    wanted = torch.cat([wanted for _, wanted, _ in parts])
    best = torch.cat([best for _, _, best in parts])
    if past is not None:
        sums, best = past.sums(sums), past.leaders(best)
        wanted = wanted - past.target_bias + past.raised
    top = topk.decode_ids(best).cpu().numpy()
    log_total = sums.total.log()
    return Scores(
        loss=(sums.top + log_total - wanted).cpu().numpy() if losses else None,
        entropy=(log_total - sums.dot / sums.total).clamp_min(0).cpu().numpy() if losses else None,
        rank=sums.reached.long().cpu().numpy(),
        top=np.pad(top, ((0, 0), (0, k - width)), constant_values=-1),
    )


def _blocks(candidates: Candidates, queries: Tensor, memory_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """(place of the first row, rows in the queries' type on their device) of consecutive blocks of this process."""
    if not sum(len(piece) for piece in candidates.pieces):
        return  # more processes than candidates
    table = CandidateTable(candidates.pieces)
    rows = max(4096, memory_bytes // 4 // (table.width * queries.element_size()))
    reach = max_abs(queries)
    for start, block in table.blocks(rows, queries.device):
        most = max_abs(block)
        if not math.isfinite(most):
            raise ModelError(
                f"the candidates hold NaN or infinity between places {candidates.first + start} and "
                f"{candidates.first + start + len(block)}",
                next_step="check the run that made the vectors; habitus embed makes them again",
            )
        check_scale(reach, most, table.width)
        # A table on the device comes as one block; converting it piece by piece keeps the memory bounded.
        step = len(block) if block.dtype == queries.dtype else rows
        for at in range(0, len(block), step):
            yield candidates.first + start + at, block[at : at + step].to(queries.dtype)


def _begin(
    queries: Tensor, target_rows: Tensor, bias: Tensor | None, k: int, memory_bytes: int, losses: bool
) -> list[TorchScan] | list[TritonScan]:
    """A fresh scan per batch of queries. All batches but the last have one size, which depends on no block."""
    tiled = not refusal_reason(SoftmaxBackend.TRITON, queries.device, queries.dtype, queries.shape[1], False)
    if tiled:
        most = max(128, memory_bytes // 2 // (8 * (2 * buffer_slots(k) + 2 * k)) // 128 * 128) if k else len(queries)
        batch = -(-len(queries) // -(-len(queries) // most))
        batch = -(-batch // 128) * 128
        return [
            TritonScan(queries[at : at + batch], target_rows[at : at + batch], _part(bias, at, batch), k)
            for at in range(0, len(queries), batch)
        ]
    tile_bytes = 3 * PLAIN_ROWS * torch.promote_types(queries.dtype, torch.float32).itemsize
    columns = max(4 * SCAN_GROUP, min(PLAIN_COLUMNS, memory_bytes // tile_bytes) // SCAN_GROUP * SCAN_GROUP)
    plain: list[TorchScan] = []
    for at in range(0, len(queries), PLAIN_ROWS):
        part, rows = queries[at : at + PLAIN_ROWS], target_rows[at : at + PLAIN_ROWS]
        if queries.device.type != "cpu":
            plain.append(TorchScan(part, rows, _part(bias, at, PLAIN_ROWS), k, columns, losses=losses))
            continue
        scan = CpuScan(part, rows, _part(bias, at, PLAIN_ROWS), k, columns, losses=losses)
        if plain:
            scan.share_scratch(cast(CpuScan, plain[0]))
        plain.append(scan)
    return plain


def _part(bias: Tensor | None, at: int, size: int) -> Tensor | None:
    return None if bias is None else bias[at : at + size]


def _merged(scan: TorchScan | TritonScan, ranks: Ranks) -> tuple[Sums, Tensor, Tensor]:
    """Sums over all processes in float64, the targets' scores, and the keys of the best candidates."""
    wanted, best = scan.target_scores(), scan.topk_keys()
    assert wanted is not None
    best = torch.empty(len(wanted), 0, dtype=torch.int64, device=wanted.device) if best is None else best
    own = _sums(scan, wanted)
    stacked = torch.stack([own.top, own.total, own.dot, own.reached])
    everyone = torch.stack(ranks.gathered(stacked), 1)  # [4, W, M]
    keys = ranks.gathered(best)
    merged = best if len(keys) == 1 else topk.merge_topk(keys[0], torch.cat(keys[1:], 1))
    return merge_sums(Sums(*everyone)), wanted.double(), merged


def _sums(scan: TorchScan | TritonScan, wanted: Tensor) -> Sums:
    """A scan's sums in float64; a process without rows adds nothing, at the level of the target's score."""
    started = scan.started if isinstance(scan, TorchScan) else scan.running is not None
    if not started:
        zero = torch.zeros_like(wanted, dtype=torch.float64)
        return Sums(wanted.double(), zero, zero, zero)
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
