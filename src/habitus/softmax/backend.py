"""Which code computes a softmax over candidates: chosen once per situation, logged, overridable.

    M  queries      V  candidates      d  width of a vector

Every backend has the same two functions: forward gives the average candidate, the log-sum-exp and the entropy;
backward, given the log-sum-exp, the gradients.
"""

import functools
import logging
from enum import StrEnum

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.softmax.attention import (
    Kernel,
    attend,
    candidate_gradient,
    cpu_kernel,
    cudnn_kernel,
    flash_kernel,
    kernel_width,
    working_dtype,
)
from habitus.softmax.chunked import chunked_backward, chunked_forward
from habitus.softmax.merging import PartialSoftmax
from habitus.softmax.tiles import tiled_backward, tiled_forward

log = logging.getLogger(__name__)

_FUSED_WIDTH = 256  # the widest vector that fused attention on CUDA takes


class SoftmaxBackend(StrEnum):
    """The ways to compute it, in the order in which they are tried."""

    CPU = "cpu"  # PyTorch's fused attention on CPU
    CUDNN = "cudnn"  # cuDNN's fused attention, bfloat16, width <= 256 (248 with a bias)
    FLASH = "flash"  # FlashAttention, the same limits
    TRITON = "triton"  # own tile kernels and matrix products, bfloat16 or float16, any width
    CHUNKED = "chunked"  # plain PyTorch in bounded blocks, anything


KERNELS: dict[SoftmaxBackend, Kernel] = {
    SoftmaxBackend.CPU: cpu_kernel,
    SoftmaxBackend.CUDNN: cudnn_kernel,
    SoftmaxBackend.FLASH: flash_kernel,
}


def choose_backend(queries: Tensor, *, biased: bool, backend: SoftmaxBackend | str | None = None) -> str:
    """The first backend in the order that takes these tensors, or the requested one if it does.

    `biased` says that bias columns will be needed: for a bias, or for the gradient of the candidates.
    """
    # A compiled step may hold the width as a symbol; the choice depends on its value, and len() makes it a number.
    width = len(range(queries.shape[1]))
    return _choose(queries.device, queries.dtype, width, biased, backend)


@torch.compiler.assume_constant_result  # a compiled step chooses when it is traced
def _choose(device: torch.device, dtype: torch.dtype, d: int, biased: bool, backend: str | None) -> str:
    if backend is None:
        return _first_that_works(device, dtype, d, biased)
    try:
        choice = SoftmaxBackend(backend)
    except ValueError:
        raise ModelError(
            f"There is no softmax backend called '{backend}'.", expected=", ".join(SoftmaxBackend)
        ) from None
    reason = refusal_reason(choice, device, dtype, d, biased)
    if reason:
        raise ModelError(
            f"The softmax backend '{choice}' cannot be used here: {reason}.",
            next_step="Omit backend: the first that works is then chosen.",
        )
    return str(choice)


@functools.cache
def _first_that_works(device: torch.device, dtype: torch.dtype, d: int, biased: bool) -> str:
    refused: list[str] = []
    for choice in SoftmaxBackend:
        reason = refusal_reason(choice, device, dtype, d, biased)
        if not reason:
            bias = " with a bias" if biased else ""
            passed_over = "; ".join(refused) or "none"
            log.info("softmax on %s, %s, width %d%s: %s (refused: %s)", device, dtype, d, bias, choice, passed_over)
            return str(choice)
        refused.append(f"{choice}: {reason}")
    raise ModelError(f"No softmax backend takes {dtype} on {device}: {'; '.join(refused)}.")


@functools.cache
def refusal_reason(backend: SoftmaxBackend, device: torch.device, dtype: torch.dtype, d: int, biased: bool) -> str:
    """Why a backend does not take such tensors, or an empty string if it does. Tried once on a tiny example."""
    if backend is SoftmaxBackend.CHUNKED:
        return ""
    if backend is SoftmaxBackend.CPU:
        return "" if device.type == "cpu" else "the tensors are not on the CPU"
    if device.type != "cuda":
        return "the tensors are not on a CUDA device"
    if backend is SoftmaxBackend.TRITON:
        if dtype not in (torch.bfloat16, torch.float16):
            return f"{dtype} is not a type of its tensor-core products"
    elif dtype != torch.bfloat16:
        return f"{dtype} is not bfloat16"
    elif kernel_width(d, dtype, biased) > _FUSED_WIDTH:
        return f"width {d} is more than {_FUSED_WIDTH - 8 if biased else _FUSED_WIDTH}"
    return _trial(backend, device, dtype, d)


def _trial(backend: SoftmaxBackend, device: torch.device, dtype: torch.dtype, d: int) -> str:
    """What goes wrong on 64 x 128 scores, if anything does."""
    queries = torch.ones(64, d, dtype=dtype, device=device)
    candidates = torch.ones(128, d, dtype=dtype, device=device)
    try:
        forward(backend, queries, candidates, None, False).lse.sum().item()
    except (RuntimeError, ImportError, NotImplementedError) as error:
        return f"it failed when tried ({str(error).splitlines()[0][:200]})"
    return ""


def forward(backend: str, queries: Tensor, candidates: Tensor, bias: Tensor | None, need_mean: bool) -> PartialSoftmax:
    """The average candidate [M, d] ([0, d]: not needed, or left to `backward`), log-sum-exp [M] and entropy [M]."""
    with torch.autocast(queries.device.type, enabled=False):
        if backend == SoftmaxBackend.TRITON:
            lse, entropy = tiled_forward(queries, candidates, bias)
            return PartialSoftmax(queries.new_empty(0, queries.shape[1]), lse, entropy)
        if backend == SoftmaxBackend.CHUNKED:
            return chunked_forward(queries, candidates, bias, need_mean)
        return attend(queries, candidates, candidates, bias, KERNELS[SoftmaxBackend(backend)])


def backward(
    backend: str,
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    weights: Tensor,
    trainable: bool,
) -> tuple[Tensor, Tensor]:
    """sum_i weights_i p_ij h_i [V, d] where trainable, and weights_i sum_j p_ij e_j [M, d] where `forward` left it out.

    p_ij = exp(z_ij + bias_j - lse_i). What is not computed is [0, d].
    """
    with torch.autocast(queries.device.type, enabled=False):
        if backend == SoftmaxBackend.TRITON:
            return tiled_backward(queries, candidates, bias, lse, weights, trainable=trainable)
        nothing = lse.new_empty(0, queries.shape[1])
        if not trainable:
            return nothing, nothing.clone()
        if backend == SoftmaxBackend.CHUNKED:
            return nothing, chunked_backward(queries, candidates, bias, lse, weights)
        weighted = (queries.to(lse.dtype) * weights[:, None]).to(working_dtype(queries))
        kernel = KERNELS[SoftmaxBackend(backend)]
        return nothing, candidate_gradient(candidates, bias, queries, weighted, lse, kernel)
