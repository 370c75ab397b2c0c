"""Triton kernels of packed attention. Imported only where a CUDA device runs them.

A block of rows loops over the keys between its smallest `begin` and its largest `end`. Short texts therefore
cost one or two tiles and no padding, and causal histories only the tiles of their own segment. The grid
depends on R and H alone, never on how the rows are divided.

Letters: R rows, H heads, d head size; in kernels M query rows and N key rows of a tile, D is d padded.
"""

# mypy: allow-untyped-defs
# Kernel arguments are pointers and compile-time constants; Triton gives them no types of Python.
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


def forward(qkv: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Output [R, H, d] and base-2 log-sum-exp of the scaled scores [H, R] for contiguous qkv [R, 3, H, d]."""
    R, _, H, d = qkv.shape
    out = qkv.new_empty(R, H, d)
    lse = qkv.new_empty(H, R, dtype=torch.float32)
    tiles = _tiles(d)
    _forward_kernel[(triton.cdiv(R, tiles["M"]), H)](
        qkv, begin, end, out, lse, R, H, d, _LOG2_E / math.sqrt(d), EXACT=qkv.dtype == torch.float32, **tiles
    )
    return out, lse


def backward(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: tuple[Tensor, ...]) -> Tensor:
    """The gradient of qkv, [R, 3, H, d]. Each row is written by one program, so it is the same every time."""
    begin, end, first, last = bounds
    R, _, H, d = qkv.shape
    result = torch.empty_like(qkv)
    delta = torch.empty_like(lse)  # Σ grad·out per row, what the softmax's own gradient subtracts
    tiles = _tiles(d)
    grid = (triton.cdiv(R, tiles["M"]), H)
    options = {"EXACT": qkv.dtype == torch.float32, **tiles}
    _query_gradient[grid](
        qkv, grad, out, lse, begin, end, result, delta, R, H, d, 1 / math.sqrt(d), _LOG2_E / math.sqrt(d), **options
    )
    _key_value_gradient[grid](
        qkv, grad, lse, delta, begin, end, first, last, result, R, H, d,
        1 / math.sqrt(d), _LOG2_E / math.sqrt(d), **options,
    )  # fmt: skip
    return result


def _tiles(d: int) -> dict[str, Any]:
    """Tile sizes: small enough that a block of short texts loads little beyond itself."""
    D = max(16, triton.next_power_of_2(d))
    return {"M": 64, "N": 64 if D <= 64 else 32, "D": D, "num_warps": 4, "num_stages": 2}


@triton.jit
def _forward_kernel(
    qkv, begin, end, out, lse, R, H, d, scale,
    EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    here = rows < R
    columns = tl.arange(0, D)
    inside = columns < d
    low = tl.load(begin + rows, mask=here, other=2147483647)
    high = tl.load(end + rows, mask=here, other=0)
    stride = 3 * H * d  # from one row of qkv to the next
    query_at = rows.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
    query = tl.load(qkv + query_at, mask=here[:, None] & inside[None, :], other=0.0)

    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    gathered = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(low), tl.max(high), N):
        keys = start + tl.arange(0, N)
        key_at = keys.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
        there = (keys < R)[:, None] & inside[None, :]
        key = tl.load(qkv + H * d + key_at, mask=there, other=0.0)
        value = tl.load(qkv + 2 * H * d + key_at, mask=there, other=0.0)
        scores = _dot(query, tl.trans(key), EXACT) * scale
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        # A row that sees nothing of this tile has no finite maximum yet; keep the exponent defined.
        anchor = tl.where(better == -float("inf"), 0.0, better)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None] + _dot(weights.to(value.dtype), value, EXACT)
        best = better
    total = tl.where(total == 0.0, 1.0, total)
    result = gathered / total[:, None]
    out_at = rows.to(tl.int64)[:, None] * (H * d) + head * d + columns[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=here[:, None] & inside[None, :])
    tl.store(lse + head * R + rows, best + tl.log2(total), mask=here)


@triton.jit
def _query_gradient(
    qkv, grad, out, lse, begin, end, result, delta, R, H, d, plain_scale, scale,
    EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    here = rows < R
    columns = tl.arange(0, D)
    inside = columns < d
    low = tl.load(begin + rows, mask=here, other=2147483647)
    high = tl.load(end + rows, mask=here, other=0)
    stride = 3 * H * d
    whole = here[:, None] & inside[None, :]
    query_at = rows.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
    out_at = rows.to(tl.int64)[:, None] * (H * d) + head * d + columns[None, :]
    query = tl.load(qkv + query_at, mask=whole, other=0.0)
    upstream = tl.load(grad + out_at, mask=whole, other=0.0)
    output = tl.load(out + out_at, mask=whole, other=0.0)
    mean = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta + head * R + rows, mean, mask=here)
    norm = tl.load(lse + head * R + rows, mask=here, other=0.0)

    total = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(low), tl.max(high), N):
        keys = start + tl.arange(0, N)
        key_at = keys.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
        there = (keys < R)[:, None] & inside[None, :]
        key = tl.load(qkv + H * d + key_at, mask=there, other=0.0)
        value = tl.load(qkv + 2 * H * d + key_at, mask=there, other=0.0)
        scores = _dot(query, tl.trans(key), EXACT) * scale
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        weights = tl.where(seen, tl.exp2(scores - norm[:, None]), 0.0)
        slope = weights * (_dot(upstream, tl.trans(value), EXACT) - mean[:, None]) * plain_scale
        total += _dot(slope.to(key.dtype), key, EXACT)
    tl.store(result + query_at, total.to(result.dtype.element_ty), mask=whole)


@triton.jit
def _key_value_gradient(
    qkv, grad, lse, delta, begin, end, first, last, result, R, H, d, plain_scale, scale,
    EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    keys = tl.program_id(0) * M + tl.arange(0, M)
    here = keys < R
    columns = tl.arange(0, D)
    inside = columns < d
    from_row = tl.min(tl.load(first + keys, mask=here, other=2147483647))
    to_row = tl.max(tl.load(last + keys, mask=here, other=0))
    stride = 3 * H * d
    whole = here[:, None] & inside[None, :]
    key_at = keys.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
    key = tl.load(qkv + H * d + key_at, mask=whole, other=0.0)
    value = tl.load(qkv + 2 * H * d + key_at, mask=whole, other=0.0)

    key_total = tl.zeros([M, D], tl.float32)
    value_total = tl.zeros([M, D], tl.float32)
    for start in range(from_row, to_row, N):
        rows = start + tl.arange(0, N)
        valid = rows < R
        there = valid[:, None] & inside[None, :]
        query_at = rows.to(tl.int64)[:, None] * stride + head * d + columns[None, :]
        grad_at = rows.to(tl.int64)[:, None] * (H * d) + head * d + columns[None, :]
        query = tl.load(qkv + query_at, mask=there, other=0.0)
        upstream = tl.load(grad + grad_at, mask=there, other=0.0)
        low = tl.load(begin + rows, mask=valid, other=2147483647)
        high = tl.load(end + rows, mask=valid, other=0)
        norm = tl.load(lse + head * R + rows, mask=valid, other=0.0)
        mean = tl.load(delta + head * R + rows, mask=valid, other=0.0)
        scores = _dot(key, tl.trans(query), EXACT) * scale  # [M keys, N rows]
        seen = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
        weights = tl.where(seen, tl.exp2(scores - norm[None, :]), 0.0)
        value_total += _dot(weights.to(upstream.dtype), upstream, EXACT)
        slope = weights * (_dot(value, tl.trans(upstream), EXACT) - mean[None, :]) * plain_scale
        key_total += _dot(slope.to(query.dtype), query, EXACT)
    tl.store(result + H * d + key_at, key_total.to(result.dtype.element_ty), mask=whole)
    tl.store(result + 2 * H * d + key_at, value_total.to(result.dtype.element_ty), mask=whole)


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    # float32 tensors must not be rounded to tf32: the tests compare devices to float32 rounding.
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:  # noqa: RET505 (a constant condition: Triton compiles one branch only)
        return tl.dot(a, b)
