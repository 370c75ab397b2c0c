"""Which rows attend to which: the same layer serves unpadded text and packed histories on any device.

Letters: R rows (tokens or slots, one after another), H heads, d head size, B windows, L slots, n items.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.model.packed_attention import packed_attention


class PackedRows(NamedTuple):
    """Row i attends to rows begin[i]..end[i]-1, and is attended to by rows first[i]..last[i]-1. For CUDA.

    All are int32 [R], of fixed length whatever the data, so that a step can be captured as a graph.
    """

    begin: Tensor
    end: Tensor
    first: Tensor
    last: Tensor
    turns: Tensor | None = None  # rotary cosines and sines of each row, float32 [R, 2, d/2]

    @staticmethod
    def bidirectional(begin: Tensor, end: Tensor) -> "PackedRows":
        """Everything inside a segment sees everything else inside it."""
        return PackedRows(begin, end, begin, end)

    @staticmethod
    def causal(boundaries: Tensor, rows: int, turns: Tensor | None = None) -> "PackedRows":
        """Each row sees its own segment up to itself; `boundaries` end with `rows`, repeated at will."""
        row = torch.arange(rows, dtype=torch.int32, device=boundaries.device)
        segment = torch.searchsorted(boundaries, row, right=True, out_int32=True)
        begin, last = boundaries[segment - 1], boundaries[segment]
        return PackedRows(begin, row + 1, row, last, turns)


class MaskedWindows(NamedTuple):
    """B windows of L slots under a block-causal mask, bool [B, 1, L, L]. For CPU."""

    mask: Tensor
    turns: Tensor | None = None  # as above

    @staticmethod
    def causal(segments: Tensor, turns: Tensor | None = None) -> "MaskedWindows":
        """True where slot j of a window may be seen from slot i: the same segment, and not later."""
        slots = segments.shape[1]
        earlier = torch.ones(slots, slots, dtype=torch.bool, device=segments.device).tril()
        same = segments[:, :, None] == segments[:, None, :]
        return MaskedWindows((same & earlier)[:, None], turns)


class LengthGroups(NamedTuple):
    """Rows sorted by the length of their text: `groups` are (number of items, tokens each). For CPU.

    Items of one length form a dense block, so neither padding nor a mask is needed.
    """

    groups: tuple[tuple[int, int], ...]


Layout = PackedRows | MaskedWindows | LengthGroups


def attend(qkv: Tensor, layout: Layout, scale: float | None = None) -> Tensor:
    """Attention's output [R, H, d] of queries, keys and values [R, 3, H, d]; scores times 1/sqrt(d) unless said."""
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(layout, PackedRows):
        return packed_attention(qkv, layout.begin, layout.end, layout.first, layout.last, layout.turns, scale)
    if isinstance(layout, MaskedWindows):
        qkv = qkv if layout.turns is None else turned(qkv, layout.turns)
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


def rotary_turns(places: Tensor, d: int) -> Tensor:
    """Cosines and sines, float32 [len(places), 2, d/2], of the angles by which a place turns a head's pairs."""
    # Base 10,000 as is usual; the slowest pair turns by a fraction of a degree within a window of 256.
    exponents = torch.arange(0, d, 2, dtype=torch.float32, device=places.device) / d
    angles = places.float()[:, None] * 10_000.0**-exponents
    return torch.stack((angles.cos(), angles.sin()), 1)


def turned(qkv: Tensor, turns: Tensor) -> Tensor:
    """qkv [R, 3, H, d] with queries and keys turned pairwise; entry i pairs with entry i + d/2."""
    cos, sin = turns[:, :1, None], turns[:, 1:, None]  # [R, 1, 1, d/2]
    both, value = qkv.split((2, 1), dim=1)  # not slices: the gradient of each would be a whole tensor of zeros
    left, right = both.chunk(2, dim=-1)
    pairs = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return torch.cat((pairs.to(qkv.dtype), value), dim=1)
