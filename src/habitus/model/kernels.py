"""Triton kernels of packed attention, rope and GELU. Imported only where a CUDA device runs them.

A block of rows loops over the keys between its smallest `begin` and its largest `end`. Short texts therefore
cost one or two tiles and no padding, and causal histories only the tiles of their own segment. The grid
depends on R and H alone, never on how the rows are divided.

Rope is a pass of its own before the attention, and after the gradient in place: inside the attention each tile would be
rotated again by every block that reads it, and compiled from PyTorch's operators it took twice the time.

Letters: R rows, H heads, d head size; in kernels M rows and N rows of the two sides of a tile, D is d padded.
"""

# mypy: allow-untyped-defs
# Kernel arguments are pointers and compile-time constants; Triton gives them no types of Python.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from habitus.model.activation import DENSITY_AT_ZERO, ROOT_HALF, SERIES, P

_LOG2_E = 1.4426950408889634
_GELU_SIZE = 1024  # entries per program: eight for each thread of four warps, which it loads and stores at once
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in SERIES)
_P, _ROOT_HALF, _DENSITY = tl.constexpr(P), tl.constexpr(ROOT_HALF), tl.constexpr(DENSITY_AT_ZERO)


def attention_forward(qk: Tensor, qkv: Tensor, begin: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [R, H, d] and base-2 log-sum-exp of the scaled scores [H, R].

    Queries and keys come first in `qk` [R, 2 or 3, H, d], which may be qkv itself, and values last in qkv [R, 3, H, d].
    """
    R, _, H, d = qkv.shape
    out = qkv.new_empty(R, H, d)
    lse = qkv.new_empty(H, R, dtype=torch.float32)
    options = _options(qkv) | {"QK": qk.shape[1]}
    grid = (triton.cdiv(R, options["M"]), H)
    _attention_kernel[grid](qk, qkv, begin, end, out, lse, R, _LOG2_E * scale, **options)
    return out, lse


def attention_backward(
    grad: Tensor,
    qk: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
) -> Tensor:
    """The gradient of queries and keys as in `qk` and of the values, [R, 3, H, d].

    Each row is written by one program, so it is the same every time.
    """
    begin, end, first, last = bounds
    R, _, H, _ = qkv.shape
    result = torch.empty_like(qkv)
    delta = torch.empty_like(lse)  # Σ grad·out per row, what the softmax's own gradient subtracts
    options = _options(qkv) | {"QK": qk.shape[1]}
    grid = (triton.cdiv(R, options["M"]), H)
    _query_gradient_kernel[grid](
        qk, qkv, grad, out, lse, begin, end, result, delta, R, scale, _LOG2_E * scale, **options
    )
    _key_value_gradient_kernel[grid](
        qk, qkv, grad, lse, delta, begin, end, first, last, result, R, scale, _LOG2_E * scale, **options
    )
    return result


def rotate(qkv: Tensor, rope: Tensor) -> Tensor:
    """Queries and keys [R, 2, H, d] of qkv [R, 3, H, d], rotated pairwise by cosines and sines [R, 2, d/2]."""
    R, _, H, d = qkv.shape
    rotated = qkv.new_empty(R, 2, H, d)
    _rotate(qkv, rope, rotated, back=False)
    return rotated


def rotate_gradient_back(gradient: Tensor, rope: Tensor) -> None:
    """Turn the gradient [R, 3, H, d] of what `rotate` returned, and of the values, into that of qkv, in place."""
    _rotate(gradient, rope, gradient, back=True)


def _rotate(source: Tensor, rope: Tensor, target: Tensor, *, back: bool) -> None:
    R, _, H, d = source.shape
    half = triton.next_power_of_2(d // 2)
    rows = max(1, 1024 // half)  # eight entries, 16 bytes of bfloat16, per thread
    grid = (triton.cdiv(R, rows),)
    _rope_kernel[grid](
        source, rope, target, R, FROM=source.shape[1], TO=target.shape[1], H=H, HALF=d // 2, N=half, ROWS=rows,
        BACK=back, num_warps=4,
    )  # fmt: skip


def _options(qkv: Tensor) -> dict[str, Any]:
    """Compile-time constants. Sizes are among them: Triton must know what they divide by to load in bulk.

    Tiles of 64 by 32 with four warps were the best or within 5% of it, on texts and on histories, of those
    tried on an H200 (docs/measurements).
    """
    _, _, H, d = qkv.shape
    D = max(16, triton.next_power_of_2(d))
    return {
        "H": H,
        "d": d,
        "EXACT": qkv.dtype == torch.float32,
        "M": 64 if D <= 128 else 32,
        "N": 32,
        "D": D,
        "num_warps": 4,
        "num_stages": 2,
    }


def gelu_forward(x: Tensor) -> Tensor:
    """x·Φ(x) of a contiguous tensor."""
    out = torch.empty_like(x)
    _gelu_kernel[(triton.cdiv(x.numel(), _GELU_SIZE),)](x, out, x.numel(), SIZE=_GELU_SIZE)
    return out


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, given that of the result; both contiguous."""
    out = torch.empty_like(x)
    _gelu_gradient_kernel[(triton.cdiv(x.numel(), _GELU_SIZE),)](grad, x, out, x.numel(), SIZE=_GELU_SIZE)
    return out


# R changes with every batch of texts; a kernel of its own for lengths that 16 divides would gain nothing.
@triton.jit(do_not_specialize=["R"])
def _attention_kernel(
    qk, qkv, begin, end, out, lse, R, scale,
    QK: tl.constexpr, H: tl.constexpr, d: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    low = tl.load(begin + rows, mask=rows < R, other=2147483647)
    high = tl.load(end + rows, mask=rows < R, other=0)
    query = _get(qk, 0, rows, R, head, QK, H, d, D)

    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    gathered = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(low), tl.max(high), N):
        keys = start + tl.arange(0, N)
        key = _get(qk, 1, keys, R, head, QK, H, d, D)
        value = _get(qkv, 2, keys, R, head, 3, H, d, D)
        scores = _dot(query, tl.trans(key), EXACT) * scale
        visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        # A row that sees nothing of this tile has no finite maximum yet; keep the exponent defined.
        anchor = tl.where(better == -float("inf"), 0.0, better)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None] + _dot(weights.to(value.dtype), value, EXACT)
        best = better
    total = tl.where(total == 0.0, 1.0, total)
    _put(out, 0, gathered / total[:, None], rows, R, head, 1, H, d, D)
    tl.store(lse + head * R + rows, best + tl.log2(total), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def _query_gradient_kernel(
    qk, qkv, grad, out, lse, begin, end, result, delta, R, plain_scale, scale,
    QK: tl.constexpr, H: tl.constexpr, d: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    low = tl.load(begin + rows, mask=rows < R, other=2147483647)
    high = tl.load(end + rows, mask=rows < R, other=0)
    query = _get(qk, 0, rows, R, head, QK, H, d, D)
    upstream = _get(grad, 0, rows, R, head, 1, H, d, D)
    output = _get(out, 0, rows, R, head, 1, H, d, D)
    mean = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta + head * R + rows, mean, mask=rows < R)
    norm = tl.load(lse + head * R + rows, mask=rows < R, other=0.0)

    total = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(low), tl.max(high), N):
        keys = start + tl.arange(0, N)
        key = _get(qk, 1, keys, R, head, QK, H, d, D)
        value = _get(qkv, 2, keys, R, head, 3, H, d, D)
        scores = _dot(query, tl.trans(key), EXACT) * scale
        visible = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        weights = tl.where(visible, tl.exp2(scores - norm[:, None]), 0.0)
        slope = weights * (_dot(upstream, tl.trans(value), EXACT) - mean[:, None]) * plain_scale
        total += _dot(slope.to(key.dtype), key, EXACT)
    _put(result, 0, total, rows, R, head, 3, H, d, D)


@triton.jit(do_not_specialize=["R"])
def _key_value_gradient_kernel(
    qk, qkv, grad, lse, delta, begin, end, first, last, result, R, plain_scale, scale,
    QK: tl.constexpr, H: tl.constexpr, d: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    keys = tl.program_id(0) * M + tl.arange(0, M)
    from_row = tl.min(tl.load(first + keys, mask=keys < R, other=2147483647))
    to_row = tl.max(tl.load(last + keys, mask=keys < R, other=0))
    key = _get(qk, 1, keys, R, head, QK, H, d, D)
    value = _get(qkv, 2, keys, R, head, 3, H, d, D)

    key_total = tl.zeros([M, D], tl.float32)
    value_total = tl.zeros([M, D], tl.float32)
    for start in range(from_row, to_row, N):
        rows = start + tl.arange(0, N)
        query = _get(qk, 0, rows, R, head, QK, H, d, D)
        upstream = _get(grad, 0, rows, R, head, 1, H, d, D)
        low = tl.load(begin + rows, mask=rows < R, other=2147483647)
        high = tl.load(end + rows, mask=rows < R, other=0)
        norm = tl.load(lse + head * R + rows, mask=rows < R, other=0.0)
        mean = tl.load(delta + head * R + rows, mask=rows < R, other=0.0)
        scores = _dot(key, tl.trans(query), EXACT) * scale  # [M keys, N rows]
        visible = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
        weights = tl.where(visible, tl.exp2(scores - norm[None, :]), 0.0)
        value_total += _dot(weights.to(upstream.dtype), upstream, EXACT)
        slope = weights * (_dot(value, tl.trans(upstream), EXACT) - mean[None, :]) * plain_scale
        key_total += _dot(slope.to(query.dtype), query, EXACT)
    _put(result, 1, key_total, keys, R, head, 3, H, d, D)
    _put(result, 2, value_total, keys, R, head, 3, H, d, D)


@triton.jit(do_not_specialize=["R"])
def _rope_kernel(
    source, rope, target, R,
    FROM: tl.constexpr, TO: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, N)[None, :]
    there = (rows < R) & (columns < HALF)
    cosine = tl.load(rope + rows * (2 * HALF) + columns, mask=there, other=1.0)
    sine = tl.load(rope + rows * (2 * HALF) + HALF + columns, mask=there, other=0.0)
    if BACK:
        sine = -sine
    from_at = rows * (2 * FROM * H * HALF) + columns
    to_at = rows * (2 * TO * H * HALF) + columns
    for _ in range(2 * H):  # the heads of the queries, then those of the keys
        left = tl.load(source + from_at, mask=there, other=0.0).to(tl.float32)
        right = tl.load(source + from_at + HALF, mask=there, other=0.0).to(tl.float32)
        tl.store(target + to_at, (left * cosine - right * sine).to(target.dtype.element_ty), mask=there)
        tl.store(target + to_at + HALF, (left * sine + right * cosine).to(target.dtype.element_ty), mask=there)
        from_at += 2 * HALF
        to_at += 2 * HALF


@triton.jit
def _get(source, part, rows, R, head, PARTS: tl.constexpr, H: tl.constexpr, d: tl.constexpr, D: tl.constexpr):
    """Rows of one head, [rows, D], from [R, PARTS, H, d]."""
    columns = tl.arange(0, D)
    at = rows.to(tl.int64)[:, None] * (PARTS * H * d) + (part * H + head) * d + columns[None, :]
    return tl.load(source + at, mask=(rows < R)[:, None] & (columns < d)[None, :], other=0.0)


@triton.jit
def _put(
    target, part, values, rows, R, head,
    PARTS: tl.constexpr, H: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rows of one head into [R, PARTS, H, d]."""
    columns = tl.arange(0, D)
    at = rows.to(tl.int64)[:, None] * (PARTS * H * d) + (part * H + head) * d + columns[None, :]
    there = (rows < R)[:, None] & (columns < d)[None, :]
    tl.store(target + at, values.to(target.dtype.element_ty), mask=there)


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    # float32 tensors must not be rounded to tf32: the tests compare devices to float32 rounding.
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:  # noqa: RET505 (a constant condition: Triton compiles one branch only)
        return tl.dot(a, b)


@triton.jit
def _gelu_kernel(x, out, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + place, mask=place < count).to(tl.float32)
    share, _ = _normal(value)
    tl.store(out + place, (value * share).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _gelu_gradient_kernel(grad, x, out, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + place, mask=place < count).to(tl.float32)
    upstream = tl.load(grad + place, mask=place < count).to(tl.float32)
    share, bell = _normal(value)
    slope = share + value * (_DENSITY * bell)
    tl.store(out + place, (upstream * slope).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _normal(value):
    """Φ and exp(-value²/2), as in `habitus.model.activation.normal_distribution`."""
    a = tl.abs(value) * _ROOT_HALF
    t = 1 / (1 + _P * a)
    bell = tl.exp(-a * a)
    tail = 0.5 * bell * ((((_C5 * t + _C4) * t + _C3) * t + _C2) * t + _C1) * t
    return tl.where(value < 0, tail, 1 - tail), bell
