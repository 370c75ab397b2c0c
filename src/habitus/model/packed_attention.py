"""Fused attention over packed rows on CUDA: one operator, with its gradient, that a graph can capture.

Letters: R rows, H heads, d head size.
"""

from typing import Any

import torch
from torch import Tensor

from habitus.errors import ModelError


def packed_attention(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    turns: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention's output [R, H, d] of qkv [R, 3, H, d], with scale 1/sqrt(d) unless another is given.

    Bounds are int32 [R]: row i sees rows begin[i]..end[i]-1 and is seen by rows first[i]..last[i]-1. With `turns`,
    cosines and sines [R, 2, d/2], queries and keys are turned first.
    """
    if qkv.device.type != "cuda":
        raise ModelError(
            f"packed attention was given tensors on {qkv.device}",
            expected="a CUDA device",
            next_step="make the tensors with habitus.model.batch_tensors, which picks the layout by device",
        )
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    # Not through the function below: the compiler would trace PyTorch's wrapper around it.
    out: Tensor = torch.ops.habitus.packed_attention(qkv, begin, end, first, last, turns, scale)[0]
    return out


@torch.library.custom_op("habitus::packed_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    turns: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and queries and keys as the kernel saw them where they were turned (else empty)."""
    from habitus.model.attention_kernels import forward, turn

    qkv = qkv.contiguous()
    if turns is None:
        return *forward(qkv, qkv, begin, end, scale), qkv.new_empty(0)
    turned = turn(qkv, turns)
    return *forward(turned, qkv, begin, end, scale), turned


@_forward.register_fake
def _(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    turns: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    R, _, H, d = qkv.shape
    turned = qkv.new_empty(0) if turns is None else qkv.new_empty(R, 2, H, d)
    return qkv.new_empty(R, H, d), qkv.new_empty(H, R, dtype=torch.float32), turned


@torch.library.custom_op("habitus::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    qkv: Tensor,
    turned: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    turns: Tensor | None,
    scale: float,
) -> Tensor:
    """The gradient of what was given to `_forward`; `turned` is what it returned."""
    from habitus.model.attention_kernels import backward, turn_back

    qkv = qkv.contiguous()
    qk = qkv if turns is None else turned
    gradient = backward(grad.contiguous(), qk, qkv, out, lse, (begin, end, first, last), scale)
    if turns is not None:
        turn_back(gradient, turns)
    return gradient


@_backward.register_fake
def _(
    grad: Tensor,
    qkv: Tensor,
    turned: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    turns: Tensor | None,
    scale: float,
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, *bounds, turns, ctx.scale = inputs
    out, lse, turned = output
    ctx.save_for_backward(qkv, turned, *bounds, turns, out, lse)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, turned, begin, end, first, last, turns, out, lse = ctx.saved_tensors
    gradient = _backward(grad, qkv, turned, out, lse, begin, end, first, last, turns, ctx.scale)
    return gradient, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
