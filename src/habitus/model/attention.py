"""Attention over rows: which rows attend to which, rotary positions, and one fused operator for CUDA.

The same layer serves unpadded text and packed histories on any device; a layout says which rows a row attends to.

Letters: R rows (tokens or slots, one after another), H heads, d head size, B windows, L slots, n items.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.errors import ModelError


class PackedRows(NamedTuple):
    """Row i attends to rows begin[i]..end[i]-1, and is attended to by rows first[i]..last[i]-1. For CUDA.

    All are int32 [R], of fixed length whatever the data, so that a step can be captured as a graph.
    """

    begin: Tensor
    end: Tensor
    first: Tensor
    last: Tensor
    rope: Tensor | None = None  # rotary cosines and sines of each row, float32 [R, 2, d/2]

    @staticmethod
    def bidirectional(begin: Tensor, end: Tensor) -> "PackedRows":
        """Everything inside a segment sees everything else inside it."""
        return PackedRows(begin, end, begin, end)

    @staticmethod
    def causal(boundaries: Tensor, rows: int, rope: Tensor | None = None) -> "PackedRows":
        """Each row sees its own segment up to itself; `boundaries` end with `rows`, which may be repeated."""
        row = torch.arange(rows, dtype=torch.int32, device=boundaries.device)
        segment = torch.searchsorted(boundaries, row, right=True, out_int32=True)
        begin, last = boundaries[segment - 1], boundaries[segment]
        return PackedRows(begin, row + 1, row, last, rope)


class MaskedWindows(NamedTuple):
    """B windows of L slots under a block-causal mask, bool [B, 1, L, L]. For CPU."""

    mask: Tensor
    rope: Tensor | None = None  # as above

    @staticmethod
    def causal(segments: Tensor, rope: Tensor | None = None) -> "MaskedWindows":
        """True where slot j of a window may be seen from slot i: the same segment, and not later."""
        slots = segments.shape[1]
        earlier = torch.ones(slots, slots, dtype=torch.bool, device=segments.device).tril()
        same = segments[:, :, None] == segments[:, None, :]
        return MaskedWindows((same & earlier)[:, None], rope)


class LengthGroups(NamedTuple):
    """Rows sorted by the length of their text: `groups` are (number of items, tokens each). For CPU.

    Items of one length form a dense block, so neither padding nor a mask is needed.
    """

    groups: tuple[tuple[int, int], ...]


Layout = PackedRows | MaskedWindows | LengthGroups


def attend(qkv: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Attention's output [R, H, d] of queries, keys and values [R, 3, H, d]; the default scale is 1/sqrt(d)."""
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(layout, PackedRows):
        return packed_attention(qkv, layout, scale)
    if isinstance(layout, MaskedWindows):
        qkv = qkv if layout.rope is None else apply_rope(qkv, layout.rope)
        B, _, L, _ = layout.mask.shape
        query, key, value = qkv.unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)  # [3, B, H, L, d]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)
    pieces = []
    for part, (items, length) in zip(qkv.split([n * t for n, t in layout.groups]), layout.groups, strict=True):
        query, key, value = part.unflatten(0, (items, length)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, scale=scale)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces) if pieces else qkv[:, 0]


def rope_table(positions: Tensor, d: int) -> Tensor:
    """Cosines and sines, float32 [len(positions), 2, d/2], of the angles by which a position rotates a head's pairs."""
    # Base 10,000 as is usual; the slowest pair turns by a fraction of a degree within a window of 256.
    exponents = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
    angles = positions.float()[:, None] * 10_000.0**-exponents
    return torch.stack((angles.cos(), angles.sin()), 1)


def apply_rope(qkv: Tensor, rope: Tensor) -> Tensor:
    """qkv [R, 3, H, d] with queries and keys rotated pairwise; entry i pairs with entry i + d/2."""
    cos, sin = rope[:, :1, None], rope[:, 1:, None]  # [R, 1, 1, d/2]
    qk, value = qkv.split((2, 1), dim=1)  # not slices: the gradient of each would be a full tensor of zeros
    left, right = qk.chunk(2, dim=-1)
    rotated = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return torch.cat((rotated.to(qkv.dtype), value), dim=1)


def packed_attention(qkv: Tensor, layout: PackedRows, scale: float) -> Tensor:
    """Attention's output [R, H, d] of qkv [R, 3, H, d], with rope applied first where the layout has it. CUDA only."""
    if qkv.device.type != "cuda":
        raise ModelError(
            f"packed attention was given tensors on {qkv.device}",
            expected="a CUDA device",
            next_step="make the tensors with habitus.model.batch_tensors, which picks the layout by device",
        )
    # Not through the function below: the compiler would trace PyTorch's wrapper around it.
    out: Tensor = torch.ops.habitus.packed_attention(
        qkv, layout.begin, layout.end, layout.first, layout.last, layout.rope, scale
    )[0]
    return out


@torch.library.custom_op("habitus::packed_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    rope: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and the rotated queries and keys (empty without rope)."""
    from habitus.model.kernels import attention_forward, rotate

    qkv = qkv.contiguous()
    if rope is None:
        return *attention_forward(qkv, qkv, begin, end, scale), qkv.new_empty(0)
    rotated = rotate(qkv, rope)
    return *attention_forward(rotated, qkv, begin, end, scale), rotated


@_forward.register_fake
def _(
    qkv: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    rope: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    R, _, H, d = qkv.shape
    rotated = qkv.new_empty(0) if rope is None else qkv.new_empty(R, 2, H, d)
    return qkv.new_empty(R, H, d), qkv.new_empty(H, R, dtype=torch.float32), rotated


@torch.library.custom_op("habitus::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    qkv: Tensor,
    rotated: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    rope: Tensor | None,
    scale: float,
) -> Tensor:
    """The gradient of qkv; `rotated`, `out` and `lse` are what `_forward` returned."""
    from habitus.model.kernels import attention_backward, rotate_gradient_back

    qkv = qkv.contiguous()
    qk = qkv if rope is None else rotated
    gradient = attention_backward(grad.contiguous(), qk, qkv, out, lse, (begin, end, first, last), scale)
    if rope is not None:
        rotate_gradient_back(gradient, rope)
    return gradient


@_backward.register_fake
def _(
    grad: Tensor,
    qkv: Tensor,
    rotated: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    first: Tensor,
    last: Tensor,
    rope: Tensor | None,
    scale: float,
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    qkv, *bounds, rope, ctx.scale = inputs
    out, lse, rotated = output
    ctx.save_for_backward(qkv, rotated, *bounds, rope, out, lse)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, rotated, begin, end, first, last, rope, out, lse = ctx.saved_tensors
    gradient = _backward(grad, qkv, rotated, out, lse, begin, end, first, last, rope, ctx.scale)
    return gradient, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
