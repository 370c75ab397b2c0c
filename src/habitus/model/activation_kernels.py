"""Triton kernels of GELU and its gradient. Imported only where a CUDA device runs them."""

# mypy: allow-untyped-defs
# Kernel arguments are pointers and compile-time constants; Triton gives them no types of Python.
import torch
import triton
import triton.language as tl
from torch import Tensor

from habitus.model.activation import DENSITY_AT_ZERO, ROOT_HALF, SERIES, P

_SIZE = 1024  # entries per program: eight for each thread of four warps, which it loads and stores at once
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in SERIES)
_P, _ROOT_HALF, _DENSITY = tl.constexpr(P), tl.constexpr(ROOT_HALF), tl.constexpr(DENSITY_AT_ZERO)


def forward(x: Tensor) -> Tensor:
    """x·Φ(x) of a contiguous tensor."""
    out = torch.empty_like(x)
    _forward_kernel[(triton.cdiv(x.numel(), _SIZE),)](x, out, x.numel(), SIZE=_SIZE)
    return out


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, given that of the result; both contiguous."""
    out = torch.empty_like(x)
    _backward_kernel[(triton.cdiv(x.numel(), _SIZE),)](grad, x, out, x.numel(), SIZE=_SIZE)
    return out


@triton.jit
def _forward_kernel(x, out, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + place, mask=place < count).to(tl.float32)
    share, _ = _normal(value)
    tl.store(out + place, (value * share).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _backward_kernel(grad, x, out, count, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + place, mask=place < count).to(tl.float32)
    upstream = tl.load(grad + place, mask=place < count).to(tl.float32)
    share, bell = _normal(value)
    slope = share + value * (_DENSITY * bell)
    tl.store(out + place, (upstream * slope).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _normal(value):
    """Φ and exp(-value²/2), as in `habitus.model.activation.normal`."""
    a = tl.abs(value) * _ROOT_HALF
    t = 1 / (1 + _P * a)
    bell = tl.exp(-a * a)
    tail = 0.5 * bell * ((((_C5 * t + _C4) * t + _C3) * t + _C2) * t + _C1) * t
    return tl.where(value < 0, tail, 1 - tail), bell
