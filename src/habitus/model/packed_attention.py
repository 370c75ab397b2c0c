"""Fused attention over packed rows on CUDA: one operator, with its gradient, that a graph can capture.

Letters: R rows, H heads, d head size.
"""

from typing import Any

import torch
from torch import Tensor

from habitus.errors import ModelError


def packed_attention(qkv: Tensor, begin: Tensor, end: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Attention's output [R, H, d] of qkv [R, 3, H, d], with scale 1/sqrt(d).

    Bounds are int32 [R]: row i sees rows begin[i]..end[i]-1 and is seen by rows first[i]..last[i]-1.
    """
    if qkv.device.type != "cuda":
        raise ModelError(
            f"packed attention was given tensors on {qkv.device}",
            expected="a CUDA device",
            next_step="make the tensors with habitus.model.batch_tensors, which picks the layout by device",
        )
    out, _ = _forward(qkv, begin, end, first, last)
    return out


@torch.library.custom_op("habitus::packed_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
) -> tuple[Tensor, Tensor]:
    from habitus.model.attention_kernels import forward

    return forward(qkv.contiguous(), begin, end)


@_forward.register_fake
def _(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
) -> tuple[Tensor, Tensor]:
    R, _, H, d = qkv.shape
    return qkv.new_empty(R, H, d), qkv.new_empty(H, R, dtype=torch.float32)


@torch.library.custom_op("habitus::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
) -> Tensor:
    from habitus.model.attention_kernels import backward

    return backward(grad.contiguous(), qkv.contiguous(), out, lse, (begin, end, first, last))


@_backward.register_fake
def _(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, begin, end, first, last, out, lse = ctx.saved_tensors
    return _backward(grad, qkv, out, lse, begin, end, first, last), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
