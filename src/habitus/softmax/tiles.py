"""The Triton kernels called from PyTorch: streaming sums of scores, target scores, and blocks of probabilities.

    M  queries      V  candidates      N  candidates of one shard      d  width of a vector      S  column splits

For widths beyond 256, where fused attention stops, and for every read-out that needs scores but no gradient. The
forward pass is one product's worth of work: the log-sum-exp and the entropy are sums of scalars. The backward
pass knows the log-sum-exp, so a block of probabilities is written once, in the inputs' type, and two large matrix
products give both gradients.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from habitus.softmax.merging import SHARD_ROWS, shard_ranges

_BLOCK_BYTES = 1 << 30  # of probabilities at a time


class Tile(NamedTuple):
    """The shape in which a kernel walks over scores."""

    rows: int
    columns: int
    slice: int
    warps: int
    stages: int


class Sums(NamedTuple):
    """Per query, over the candidates so far. Fields are [M], or [S, M] before merging."""

    top: Tensor  # max of the scores z
    total: Tensor  # sum of exp(z - top)
    dot: Tensor  # sum of exp(z - top) (z - top)
    reached: Tensor  # how many scores are at least the target's


class TopKBuffer(NamedTuple):
    """Where a scan puts the candidates that beat each query's threshold."""

    thresholds: Tensor  # [M] float32
    keys: Tensor  # [M, slots] int64, as in habitus.softmax.topk
    fill: Tensor  # [M] int32; more than `slots` means that some were lost


def scan_tile(d: int) -> Tile:
    """The tile of the scan: whole vectors up to d = 256, so that the queries stay where they are; slices beyond."""
    if d <= 64:
        return Tile(64, 64, max(16, 1 << (d - 1).bit_length()), 4, 3)
    if d <= 256:
        return Tile(128, 64, max(16, 1 << (d - 1).bit_length()), 8, 3)
    return Tile(128, 256, 64, 8, 3)


def scan(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    *,
    target_scores: Tensor | None = None,
    topk_buffer: TopKBuffer | None = None,
    first_id: int = 0,
    tile: Tile | None = None,
) -> Sums:
    """The sums over one shard of candidates; with `target_scores` also how many scores reach them."""
    from habitus.softmax import kernels

    M, N = len(queries), len(candidates)
    queries, candidates = _align(queries), _align(candidates)
    d = queries.shape[1]
    tile = tile or scan_tile(d)
    row_tiles = -(-M // tile.rows)
    # Few queries leave multiprocessors idle unless the columns are split too.
    processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
    splits = max(1, min(2 * processors // row_tiles, N // (4 * tile.columns)))
    length = -(-N // (splits * tile.columns)) * tile.columns
    splits = -(-N // length)
    empty = queries.new_empty(0, dtype=torch.float32)
    top, total, dot = (queries.new_empty(splits, M, dtype=torch.float32) for _ in range(3))
    count = queries.new_zeros(splits, M, dtype=torch.int32)
    kernels.scan_kernel[(row_tiles, splits)](
        _describe(queries, tile.rows, tile.slice),
        _describe(candidates, tile.columns, tile.slice),
        empty if bias is None else bias,
        empty if target_scores is None else target_scores,
        empty if topk_buffer is None else topk_buffer.thresholds,
        top,
        total,
        dot,
        count,
        empty if topk_buffer is None else topk_buffer.keys,
        empty if topk_buffer is None else topk_buffer.fill,
        M,
        N,
        length,
        first_id,
        0 if topk_buffer is None else topk_buffer.keys.shape[1],
        D=d,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.slice,
        # The loop over tiles is pipelined where one load is a tile, the loop over slices otherwise.
        STAGES=tile.stages if d <= tile.slice else 1,
        BIASED=bias is not None,
        RAGGED=N % tile.columns != 0,
        RANKS=target_scores is not None,
        TOP=topk_buffer is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return merge_sums(Sums(top, total, dot, count))


def target_scores(queries: Tensor, rows: Tensor, bias: Tensor | None, *, tile: Tile | None = None) -> Tensor:
    """The score of every query with its own row [M], bit for bit what `scan` computes for that pair."""
    from habitus.softmax import kernels

    queries, rows = _align(queries), _align(rows)
    M, d = queries.shape
    tile = tile or scan_tile(d)
    out = queries.new_empty(M, dtype=torch.float32)
    kernels.target_kernel[(-(-M // tile.rows),)](
        _describe(queries, tile.rows, tile.slice),
        _describe(rows, tile.columns, tile.slice),
        out if bias is None else bias,
        out,
        M,
        D=d,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.slice,
        BIASED=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def probabilities(
    queries: Tensor, candidates: Tensor, bias: Tensor | None, lse: Tensor, *, tile: Tile | None = None
) -> Tensor:
    """exp(z_ij + bias_j - lse_i) as [M, N] in the queries' type."""
    from habitus.softmax import kernels

    M, N = len(queries), len(candidates)
    queries, candidates = _align(queries), _align(candidates)
    tile = tile or Tile(128, 256, 64, 8, 4)
    out = queries.new_empty(M, -(-N // 8) * 8)
    kernels.probability_kernel[(-(-M // tile.rows) * -(-N // tile.columns),)](
        _describe(queries, tile.rows, tile.slice),
        _describe(candidates, tile.columns, tile.slice),
        lse if bias is None else bias,
        lse,
        _describe(out, tile.rows, tile.columns),
        M,
        N,
        D=queries.shape[1],
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.slice,
        GROUP=8,
        BIASED=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out[:, :N]


def tiled_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The log-sum-exp [M] and the entropy [M] of each query's softmax."""
    parts = [
        scan(queries, candidates[start:stop], None if bias is None else bias[start:stop])
        for start, stop in shard_ranges(len(candidates), SHARD_ROWS)
    ]
    return lse_and_entropy(merge_sums(Sums(*(torch.stack(column) for column in zip(*parts, strict=True)))))


def tiled_backward(
    queries: Tensor, candidates: Tensor, bias: Tensor | None, lse: Tensor, weights: Tensor, *, trainable: bool
) -> tuple[Tensor, Tensor]:
    """weights_i sum_j p_ij e_j as [M, d] and, where trainable, sum_i weights_i p_ij h_i as [V, d], in float32."""
    columns = max(1024, _BLOCK_BYTES // (2 * len(queries)) // 256 * 256)
    weighted = (queries.float() * weights[:, None]).to(queries.dtype)
    query_grad = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
    candidate_grad = torch.empty(candidates.shape if trainable else (0, 0), dtype=torch.float32, device=queries.device)
    for start, stop in shard_ranges(len(candidates), min(columns, SHARD_ROWS)):
        part = candidates[start:stop]
        p = probabilities(queries, part, None if bias is None else bias[start:stop], lse)
        beta = 1 if start else 0  # the first block writes, the others add
        torch.ops.aten.addmm.dtype_out(query_grad, p, part, torch.float32, beta=beta, out=query_grad)
        if trainable:
            torch.ops.aten.mm.dtype_out(p.T, weighted, torch.float32, out=candidate_grad[start:stop])
    return query_grad.mul_(weights[:, None]), candidate_grad


def merge_sums(parts: Sums) -> Sums:
    """The sums [M] over parts [S, M], in float64 from two parts on: float32 sums of many shards would drift."""
    if len(parts.top) == 1:
        return Sums(*(column[0] for column in parts))
    tops = parts.top.double()
    top = tops.amax(0)
    fall = tops - top
    scale = fall.exp()
    dot = (scale * (parts.dot + parts.total * fall)).sum(0)
    return Sums(top, (parts.total * scale).sum(0), dot, parts.reached.sum(0))


def lse_and_entropy(sums: Sums) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and the entropy, in float32."""
    log_total = sums.total.log()
    return (sums.top + log_total).float(), (log_total - sums.dot / sums.total).float()


def _align(rows: Tensor) -> Tensor:
    """Rows whose length is a multiple of 16 bytes, as the copy engine needs them; a copy only where they are not."""
    rest = -rows.shape[1] % 8
    return F.pad(rows, (0, rest)) if rest else rows.contiguous()


def _describe(matrix: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of a matrix that is read or written in tiles of rows x columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])
