"""Loss, entropy, rank and top-k of every query over a full catalogue, in one pass over its scores.

    M  queries      V  candidates      d  width of a vector      k  items per query

Ties count against the model: rank = how many candidates score at least as much as the target, itself included, so a
constant scorer ranks last everywhere. Among equal scores top-k takes lower positions first. Scores are compared in
float32 as accumulated, never rounded to the embeddings' type, and a target's score comes from the same kernel as the
scores it is compared with.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.softmax import topk
from habitus.softmax.inputs import check_targets, has_nonfinite
from habitus.softmax.scan import MEMORY_BYTES, CandidateScan, ScanTile
from habitus.softmax.table import Candidates, CandidateTable
from habitus.softmax.tiles import lse_and_entropy

_TILE = ScanTile(256, 2048)


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
    memory_bytes: int = MEMORY_BYTES,
) -> CatalogueScores:
    """Loss, entropy, rank and top-k of every query, in one pass.

    The work is done where the queries are. Candidates may be there too, in host memory, in mapped files, or a list of
    such pieces; rows beyond `num_valid` are not looked at. Working memory stays near `memory_bytes`.
    """
    _check_k(k)
    scan = _scan(queries, candidates, targets, k, log_q, num_valid, memory_bytes)
    lse, entropy = lse_and_entropy(scan.sums())
    keys = scan.topk_keys()
    return CatalogueScores(
        loss=lse - scan.target_scores(),
        entropy=entropy.clamp_min(0),
        rank=scan.sums().reached.long(),
        top_scores=topk.decode_scores(keys),
        top_items=topk.decode_ids(keys),
    )


@torch.no_grad()
def ranks(
    queries: Tensor,
    candidates: Candidates,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Tensor:
    """The rank of each query's target among all candidates, 1 is best, as int64 [M]."""
    scan = _scan(queries, candidates, targets, 0, log_q, num_valid, memory_bytes, losses=False)
    return scan.sums().reached.long()


@torch.no_grad()
def top_k(
    queries: Tensor,
    candidates: Candidates,
    k: int,
    *,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> TopK:
    """The k best candidates of each query: scores [M, k] and positions [M, k], best first, ties by lower position."""
    _check_k(k)
    keys = _scan(queries, candidates, None, k, log_q, num_valid, memory_bytes, losses=False).topk_keys()
    return TopK(topk.decode_scores(keys), topk.decode_ids(keys))


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
) -> CandidateScan:
    """A scan of the queries over the full table."""
    table = CandidateTable(candidates, num_valid)
    _check(queries, table, targets, k, log_q)
    bias = None if log_q is None else -log_q.to(queries.device, torch.float32)
    rows = target_bias = None
    if targets is not None:
        positions = targets.to(torch.int64)
        rows = table.gather(positions, queries.device)
        target_bias = None if bias is None else bias[positions]
    scan = CandidateScan(
        queries, k, target_rows=rows, target_bias=target_bias, losses=losses, tile=_TILE, memory_bytes=memory_bytes
    )
    scan.scan_table(table, bias=bias)
    return scan


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
