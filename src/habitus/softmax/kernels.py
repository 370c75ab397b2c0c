"""Triton kernels over tiles of scores that never reach memory (CUDA, bfloat16 or float16).

    M  queries      N  candidates of one shard      D  width of a vector
    BM, BN  rows and columns of a tile      BK  slice of D per step      S  column splits      C  buffer slots

A score is a tensor-core product accumulated in float32, and every kernel obtains it from `_scores`, so that equal
candidate rows give equal bits wherever they stand. That is what makes ties exact. Matrices come as tensor descriptors:
the copy engine reads zeros outside a matrix and drops what would be written there, so edges need no masks. Triton is
imported with this file, so only code that has seen a CUDA device may import it.
"""
# mypy: disable-error-code="no-untyped-def"

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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    RAGGED: tl.constexpr,
    RANKS: tl.constexpr,
    TOP: tl.constexpr,
):
    """Per query and split: max, sum of p = exp(z - max), sum of p (z - max), how many reach the target; top-k keys."""
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    split = tl.program_id(1)
    inside = rows < M
    wide = rows.to(tl.int64)
    top = tl.full([BM], MASKED, tl.float32)
    total = tl.zeros([BM], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.int32)
    target_score = tl.full([BM], 0.0, tl.float32)
    threshold = tl.full([BM], 3.0e38, tl.float32)  # padding rows collect nothing
    if RANKS:
        target_score = tl.load(target_scores + rows, mask=inside, other=0.0)
    if TOP:
        threshold = tl.load(thresholds + rows, mask=inside, other=3.0e38)
    resident = H.load([row, 0])
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, N)
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        z = _scores(H, E, resident, row, start, D, BM, BN, BK)
        if BIASED:
            z += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
        if RAGGED:
            z = tl.where((columns < end)[None, :], z, MASKED)
        tile_top = tl.max(z, 1)
        new_top = tl.maximum(top, tile_top)
        fall = (top - new_top) * LOG2E
        shrink = tl.exp2(fall)
        # Scores below the running max, in bits: the entropy is then no difference of large numbers. Where no column has
        # counted yet, the difference of two of MASKED is rounding alone, and that is large.
        anchor = tl.where(new_top > 0.5 * MASKED, new_top, 0.0)
        bits = z * LOG2E - (anchor * LOG2E)[:, None]
        p = tl.exp2(bits)
        dot = (dot + total * fall) * shrink + tl.sum(p * bits, 1)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if RANKS:
            count += tl.sum((z >= target_score[:, None]).to(tl.int32), 1)
        if TOP:  # noqa: SIM102  (one condition is decided at compile time, the other in the loop)
            if tl.max((tile_top > threshold).to(tl.int32), 0) > 0:
                beats = z > threshold[:, None]
                slots = fill + rows[:, None] + tl.zeros([BM, BN], tl.int32)
                slot = tl.atomic_add(slots, 1, mask=beats, sem="relaxed")
                place = buffer + wide[:, None] * capacity + slot
                ids = first_id + columns.to(tl.int64)
                tl.store(place, _key(z, ids[None, :]), mask=beats & (slot < capacity))
    at = split.to(tl.int64) * M + wide
    tl.store(out_max + at, top, mask=inside)
    tl.store(out_sum + at, total, mask=inside)
    tl.store(out_dot + at, dot / LOG2E, mask=inside)
    if RANKS:
        tl.store(out_count + at, count, mask=inside)


@triton.jit
def target_kernel(
    H, E, bias, out, M, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIASED: tl.constexpr
):
    """The score of row i of H with row i of E: the diagonal of a tile, so that its bits match the scan's."""
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    resident = H.load([row, 0])
    for offset in range(0, BM, BN):
        columns = row + offset + tl.arange(0, BN)
        # A tile wider than it is high reaches into the next program's rows; those are not ours to write.
        present = (columns < M) & (columns < row + BM)
        z = _scores(H, E, resident, row, row + offset, D, BM, BN, BK)
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
    row, column = (first + within % height) * BM, within // height * BN
    z = _scores(H, E, H.load([row, 0]), row, column, D, BM, BN, BK)
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if BIASED:
        z += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    z -= tl.load(lse + rows, mask=rows < M, other=0.0)[:, None]
    P.store([row, column], tl.exp2(z * LOG2E).to(P.dtype))


@triton.jit
def _scores(H, E, resident, row, column, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The tile of scores at (row, column) in float32: one product if BK holds a whole vector, else slice by slice."""
    if D <= BK:
        return tl.dot(resident, E.load([column, 0]).T)
    z = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        z = tl.dot(H.load([row, k]), E.load([column, k]).T, z)
    return z


@triton.jit
def _key(z, ids):
    """An int64 that sorts by score, then by lower id. Adding 0.0 turns -0.0 into 0.0: they are equal scores."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids)
