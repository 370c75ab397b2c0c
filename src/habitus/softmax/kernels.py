"""Triton kernels over tiles of scores that never reach memory (CUDA, bfloat16 or float16).

    M  queries      N  candidates of one shard      D  width of a vector
    BM, BN  rows and columns of a tile      BK  slice of D per step      S  column splits      C  buffer slots

A score is a tensor-core product accumulated in float32, and every kernel obtains it from `_scores`, so that equal
candidate rows give equal bits wherever they stand. That is what makes ties exact. Triton is imported with this file,
so only code that has seen a CUDA device may import it.
"""

from typing import Any

import triton
import triton.language as tl

# A masked score. Not -inf: 0 * -inf is NaN in the sum of p*z, and exp(-1e30) is 0 all the same.
MASKED = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scan_kernel(
    H,
    E,
    bias,
    target_scores,
    thresholds,
    out_max,
    out_sum,
    out_dot,
    out_count,
    buffer,
    fill,
    M,
    N,
    split_columns,
    first_id,
    capacity,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    RAGGED: tl.constexpr,
    RANKS: tl.constexpr,
    TOP: tl.constexpr,
):
    """Per query and split: max, sum of p = exp(z - max), sum of p (z - max), how many reach the target; leaders."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    inside = rows < M
    wide = rows.to(tl.int64)
    top = tl.full([BM], MASKED, tl.float32)
    total = tl.zeros([BM], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.int32)
    wanted = tl.full([BM], 0.0, tl.float32)
    threshold = tl.full([BM], 3.0e38, tl.float32)  # padding rows lead nobody
    if RANKS:
        wanted = tl.load(target_scores + rows, mask=inside, other=0.0)
    if TOP:
        threshold = tl.load(thresholds + rows, mask=inside, other=3.0e38)
    resident = _rows(H, wide, inside, 0, D, DP if DP <= 256 else BK, True)
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, N)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        z = _scores(H, E, resident, wide, inside, columns.to(tl.int64), columns < N, D, DP, BM, BN, BK, RAGGED)
        if BIASED:
            z += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
        if RAGGED:
            z = tl.where((columns < end)[None, :], z, MASKED)
        tile_top = tl.max(z, 1)
        new_top = tl.maximum(top, tile_top)
        fall = (top - new_top) * LOG2E
        shrink = tl.exp2(fall)
        # Scores below the running max, in bits: the entropy is then no difference of large numbers.
        bits = z * LOG2E - (new_top * LOG2E)[:, None]
        p = tl.exp2(bits)
        dot = (dot + total * fall) * shrink + tl.sum(p * bits, 1)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if RANKS:
            count += tl.sum((z >= wanted[:, None]).to(tl.int32), 1)
        if TOP:  # noqa: SIM102  (one condition is decided at compile time, the other in the loop)
            if tl.max((tile_top > threshold).to(tl.int32), 0) > 0:
                leads = z > threshold[:, None]
                slots = fill + rows[:, None] + tl.zeros([BM, BN], tl.int32)
                slot = tl.atomic_add(slots, 1, mask=leads, sem="relaxed")
                place = buffer + wide[:, None] * capacity + slot
                ids = first_id + columns.to(tl.int64)
                tl.store(place, _key(z, ids[None, :]), mask=leads & (slot < capacity))
    at = split.to(tl.int64) * M + wide
    tl.store(out_max + at, top, mask=inside)
    tl.store(out_sum + at, total, mask=inside)
    tl.store(out_dot + at, dot / LOG2E, mask=inside)
    if RANKS:
        tl.store(out_count + at, count, mask=inside)


@triton.jit
def target_kernel(
    H,
    E,
    bias,
    out,
    M,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIASED: tl.constexpr,
):
    """The score of row i of H with row i of E: the diagonal of a tile, so that its bits match the scan's."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < M
    wide = rows.to(tl.int64)
    resident = _rows(H, wide, inside, 0, D, DP if DP <= 256 else BK, True)
    for offset in range(0, BM, BN):
        columns = tl.program_id(0) * BM + offset + tl.arange(0, BN)
        # A tile wider than it is high reaches into the next program's rows; those are not ours to write.
        present = (columns < M) & (columns < (tl.program_id(0) + 1) * BM)
        z = _scores(H, E, resident, wide, inside, columns.to(tl.int64), present, D, DP, BM, BN, BK, True)
        if BIASED:
            z += tl.load(bias + columns, mask=present, other=0.0)[None, :]
        own = tl.sum(tl.where(rows[:, None] == columns[None, :], z, 0.0), 0)
        tl.store(out + columns, own, mask=present)


@triton.jit
def probability_kernel(
    H,
    E,
    bias,
    lse,
    P,
    M,
    N,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    BIASED: tl.constexpr,
):
    """P[i, j] = exp(score + bias_j - lse_i), rounded once to P's type."""
    # Tiles go in groups of rows so that neighbours in time share their operands in the L2 cache.
    pid = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = pid % (GROUP * column_tiles)
    rows = (first + within % height) * BM + tl.arange(0, BM)
    columns = within // height * BN + tl.arange(0, BN)
    inside, present = rows < M, columns < N
    wide = rows.to(tl.int64)
    resident = _rows(H, wide, inside, 0, D, DP if DP <= 256 else BK, True)
    z = _scores(H, E, resident, wide, inside, columns.to(tl.int64), present, D, DP, BM, BN, BK, True)
    if BIASED:
        z += tl.load(bias + columns, mask=present, other=0.0)[None, :]
    p = tl.exp2((z - tl.load(lse + rows, mask=inside, other=0.0)[:, None]) * LOG2E)
    place = P + wide[:, None] * N + columns[None, :]
    tl.store(place, p.to(P.dtype.element_ty), mask=inside[:, None] & present[None, :])


@triton.jit
def _scores(
    H,
    E,
    resident,
    rows,
    inside,
    columns,
    present,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """The tile H[rows] E[columns]^T in float32: one product up to D = 256, a loop over slices of D beyond."""
    if DP <= 256:
        return tl.dot(resident, tl.trans(_rows(E, columns, present, 0, D, DP, RAGGED)))
    z = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        h = _rows(H, rows, inside, k, D, BK, True)
        e = _rows(E, columns, present, k, D, BK, RAGGED)
        z = tl.dot(h, tl.trans(e), z)
    return z


@triton.jit
def _rows(base, rows, valid, k, D: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Columns k .. k + WIDTH of some rows, zeros beyond D and, where RAGGED, for rows that are not there."""
    across = k + tl.arange(0, WIDTH)
    place = base + rows[:, None] * D + across[None, :]
    if RAGGED:
        if D % WIDTH == 0:
            return tl.load(place, mask=valid[:, None], other=0.0)
        return tl.load(place, mask=valid[:, None] & (across < D)[None, :], other=0.0)
    if D % WIDTH == 0:
        return tl.load(place)
    return tl.load(place, mask=(across < D)[None, :], other=0.0)


@triton.jit
def _key(z, ids):
    """An int64 that sorts by score, then by lower id. Adding 0.0 turns -0.0 into 0.0: they are equal scores."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Start a kernel. Exists so that callers need not know Triton's indexing syntax."""
    kernel[grid](*arguments, **settings)
