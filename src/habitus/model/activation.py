"""GELU, x·Φ(x), to the precision of float32 everywhere; in compiled steps on CUDA it is a kernel of fewer operations.

PyTorch's own, compiled for CUDA, computes an error function and, for the gradient, that and one more exponential. It
was 15% of a step at width 320 on an H200, a third of it beyond what reading and writing the tensors takes. Between two
matrix products there is nothing for it to be fused with, so that one operator loses nothing and is traced at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# 1 - erf(a) = (c1 t + ... + c5 t^5) exp(-a^2) with t = 1 / (1 + p a), a >= 0, is right to 1.5e-7
# (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
P = 0.3275911
SERIES = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ROOT_HALF = 0.7071067811865476
DENSITY_AT_ZERO = 0.3989422804014327


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), in the type of x."""
    # Where speed counts activations are halves; float32 keeps the library's. By its name in torch.ops, because calling
    # the function below would have the compiler trace PyTorch's wrapper around it.
    if x.is_cuda and x.dtype != torch.float32 and torch.compiler.is_compiling():
        out: Tensor = torch.ops.habitus.gelu(x)
        return out
    return F.gelu(x)


@torch.library.custom_op("habitus::gelu", mutates_args=())
def gelu_by_series(x: Tensor) -> Tensor:
    """The same from one exponential and one division, which its gradient needs as well."""
    if x.is_cuda:
        from habitus.model.kernels import gelu_forward

        return gelu_forward(x.contiguous())
    share, _ = normal_distribution(x.float())
    return (x.float() * share).to(x.dtype)


@torch.library.custom_op("habitus::gelu_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor) -> Tensor:
    if x.is_cuda:
        from habitus.model.kernels import gelu_backward

        return gelu_backward(grad.contiguous(), x.contiguous())
    share, density = normal_distribution(x.float())
    return (grad.float() * (share + x.float() * density)).to(x.dtype)


@gelu_by_series.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    gradient: Tensor = _backward(grad, *ctx.saved_tensors)
    return gradient


gelu_by_series.register_autograd(_differentiate, setup_context=_setup_context)


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution's Φ(x) and its density: what the kernels compute, in PyTorch."""
    a = x.abs() * ROOT_HALF
    t = 1 / (1 + P * a)
    bell = torch.exp(-a * a)
    total = torch.zeros_like(t)
    for coefficient in reversed(SERIES):
        total = (total + coefficient) * t
    tail = 0.5 * total * bell
    return torch.where(x < 0, tail, 1 - tail), DENSITY_AT_ZERO * bell
