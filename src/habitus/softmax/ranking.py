"""Loss, entropy, rank and top-k of every query over a full catalogue, in one pass over its scores.

    M  queries      V  candidates      d  width of a vector      k  items per query

Ties count against the model: rank = how many candidates score at least as much as the target, itself included, so a
constant scorer ranks last everywhere. Among equal scores top-k takes lower positions first. Scores are compared in
float32 as accumulated, never rounded to the embeddings' type, and a target's score comes from the same kernel as the
scores it is compared with.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.softmax import topk
from habitus.softmax.backend import SoftmaxBackend, refusal_reason
from habitus.softmax.inputs import check_scale, check_targets, has_nonfinite, max_abs
from habitus.softmax.table import Candidates, CandidateTable
from habitus.softmax.tiles import lse_and_entropy
from habitus.softmax.torch_scan import SCAN_GROUP, TorchScan
from habitus.softmax.triton_scan import TritonScan, buffer_slots

_MEMORY_BYTES = 512 << 20
_ROWS = 256  # queries per batch and
_COLUMNS = 2048  # candidates per tile: the tile stays in the processor's cache


class CatalogueScores(NamedTuple):
    """Per query: loss and entropy in nats, rank from 1, and the k best items with their scores, best first."""

    loss: Tensor
    entropy: Tensor
    rank: Tensor
    top_scores: Tensor
    top_items: Tensor


class TopK(NamedTuple):
    """Per query: the k highest scores, best first, and their positions in the table."""

    scores: Tensor
    items: Tensor


@torch.no_grad()
def catalogue_scores(
    queries: Tensor,
    candidates: Candidates,
    targets: Tensor,
    *,
    k: int = 100,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    memory_bytes: int = _MEMORY_BYTES,
) -> CatalogueScores:
    """Loss, entropy, rank and top-k of every query, in one pass.

    The work is done where the queries are. Candidates may be there too, in host memory, in mapped files, or a list of
    such pieces; rows beyond `num_valid` are not looked at. Working memory stays near `memory_bytes`.
    """
    _check_k(k)
    scans = _scan(queries, candidates, targets, k, log_q, num_valid, memory_bytes)
    terms = [lse_and_entropy(scan.sums()) for scan in scans]
    target_scores = _concatenate([scan.target_scores() for scan in scans])
    best = _concatenate([scan.topk_keys() for scan in scans])
    return CatalogueScores(
        loss=torch.cat([lse for lse, _ in terms]) - target_scores,
        entropy=torch.cat([entropy for _, entropy in terms]).clamp_min(0),
        rank=torch.cat([scan.sums().reached for scan in scans]).long(),
        top_scores=topk.decode_scores(best),
        top_items=topk.decode_ids(best),
    )


@torch.no_grad()
def ranks(
    queries: Tensor,
    candidates: Candidates,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    memory_bytes: int = _MEMORY_BYTES,
) -> Tensor:
    """The rank of each query's target among all candidates, 1 is best, as int64 [M]."""
    scans = _scan(queries, candidates, targets, 0, log_q, num_valid, memory_bytes, losses=False)
    return torch.cat([scan.sums().reached for scan in scans]).long()


@torch.no_grad()
def top_k(
    queries: Tensor,
    candidates: Candidates,
    k: int,
    *,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    memory_bytes: int = _MEMORY_BYTES,
) -> TopK:
    """The k best candidates of each query: scores [M, k] and positions [M, k], best first, ties by lower position."""
    _check_k(k)
    scans = _scan(queries, candidates, None, k, log_q, num_valid, memory_bytes, losses=False)
    best = _concatenate([scan.topk_keys() for scan in scans])
    return TopK(topk.decode_scores(best), topk.decode_ids(best))


def _scan(
    queries: Tensor,
    candidates: Candidates,
    targets: Tensor | None,
    k: int,
    log_q: Tensor | None,
    num_valid: int | None,
    memory_bytes: int,
    *,
    losses: bool = True,
) -> list[TorchScan] | list[TritonScan]:
    """Scans of consecutive batches of queries, each over the full table; the table is read once."""
    table = CandidateTable(candidates, num_valid)
    _check(queries, table, targets, k, log_q)
    device = queries.device
    bias = None if log_q is None else -log_q.to(device, torch.float32)
    max_query, max_bias = max_abs(queries), 0.0 if bias is None else max_abs(bias)
    with torch.autocast(device.type, enabled=False):
        scans = _start_scans(queries, table, targets, k, bias, memory_bytes, losses)
        block_rows = max(4096, memory_bytes // 4 // (table.width * table.dtype.itemsize))
        for start, block in table.blocks(block_rows, device):
            max_candidate = max_abs(block)
            if not math.isfinite(max_candidate):
                raise ModelError(
                    f"The candidates hold NaN or infinity between rows {start} and {start + len(block)}.",
                    next_step="Check the embedding cache that they came from.",
                )
            check_scale(max_query, max_candidate, table.width, max_bias)
            part = None if bias is None else bias[start : start + len(block)]
            for scan in scans:
                scan.update(block, part, start)
    return scans


def _start_scans(
    queries: Tensor,
    table: CandidateTable,
    targets: Tensor | None,
    k: int,
    bias: Tensor | None,
    memory_bytes: int,
    losses: bool,
) -> list[TorchScan] | list[TritonScan]:
    """A fresh scan per batch of queries, with batches small enough for the memory allowed."""
    device = queries.device
    tiled = not refusal_reason(SoftmaxBackend.TRITON, device, queries.dtype, queries.shape[1], False)
    if tiled:
        batch = max(128, memory_bytes // 2 // (8 * (2 * buffer_slots(k) + 2 * k)) // 128 * 128) if k else len(queries)
    else:
        batch = _ROWS
        tile_bytes = 3 * batch * torch.promote_types(queries.dtype, torch.float32).itemsize
        columns = max(4 * SCAN_GROUP, min(_COLUMNS, memory_bytes // tile_bytes) // SCAN_GROUP * SCAN_GROUP)
    scans: list = []
    for start in range(0, len(queries), batch):
        part = queries[start : start + batch]
        rows = target_bias = None
        if targets is not None:
            positions = targets[start : start + batch].to(torch.int64)
            rows = table.gather(positions, device)
            target_bias = None if bias is None else bias[positions]
        if tiled:
            scans.append(TritonScan(part, rows, target_bias, k))
        else:
            scans.append(TorchScan(part, rows, target_bias, k, columns, losses=losses))
    return scans


def _check_k(k: int) -> None:
    if k < 1:
        raise ModelError(f"k is {k}.", expected="at least 1")


def _check(queries: Tensor, table: CandidateTable, targets: Tensor | None, k: int, log_q: Tensor | None) -> None:
    """Raise unless the arguments belong together."""
    if queries.ndim != 2 or len(queries) == 0 or queries.shape[1] != table.width:
        raise ModelError(
            f"Queries of shape {tuple(queries.shape)} do not fit candidates of width {table.width}.",
            expected="[M, d] with at least one query and the same d",
        )
    if queries.dtype != table.dtype or not queries.dtype.is_floating_point:
        raise ModelError(
            f"Queries are {queries.dtype} and candidates {table.dtype}.", expected="one floating-point type for both"
        )
    if bool(has_nonfinite(queries)):
        raise ModelError("The queries hold NaN or infinity.", next_step="Check the model that computed them.")
    if k > len(table) or len(table) >= topk.MAX_ITEMS:
        raise ModelError(
            f"k is {k} and there are {len(table)} candidates.", expected="k at most their number, below 2^32"
        )
    if log_q is not None and log_q.ndim != 1:
        raise ModelError(f"log_q has shape {tuple(log_q.shape)}.", expected="one number per candidate")
    if log_q is not None and (len(log_q) < len(table) or bool(has_nonfinite(log_q))):
        raise ModelError(
            f"log_q has {len(log_q)} entries for {len(table)} candidates, or holds NaN or infinity.",
            expected="one finite number per candidate",
        )
    if targets is not None:
        check_targets(queries, targets)
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= len(table):
            raise ModelError(
                f"Targets run from {low} to {high}.", expected=f"positions in the candidate table, 0..{len(table) - 1}"
            )


def _concatenate(parts: list[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None])
