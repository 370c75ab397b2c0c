"""Which rows attend to which: the same layer serves padded-free text and packed histories on any device.

Letters: R rows (tokens or slots, one after another), H heads, d head size, B windows, L slots, n items.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.model.packed_attention import packed_attention


class PackedRows(NamedTuple):
    """Row i attends to rows begin[i]..end[i]-1, and is attended to by rows first[i]..last[i]-1. For CUDA.

    All four are int32 [R], of fixed length whatever the data, so that a step can be captured as a graph.
    """

    begin: Tensor
    end: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def bidirectional(begin: Tensor, end: Tensor) -> "PackedRows":
        """Everything inside a segment sees everything else inside it."""
        return PackedRows(begin, end, begin, end)

    @staticmethod
    def causal(boundaries: Tensor, rows: int) -> "PackedRows":
        """Each row sees its own segment up to itself; `boundaries` end with `rows`, repeated at will."""
        row = torch.arange(rows, dtype=torch.int32, device=boundaries.device)
        segment = torch.searchsorted(boundaries, row, right=True, out_int32=True)
        begin, last = boundaries[segment - 1], boundaries[segment]
        return PackedRows(begin, row + 1, row, last)


class MaskedWindows(NamedTuple):
    """B windows of L slots under a block-causal mask, bool [B, 1, L, L]. For CPU."""

    mask: Tensor

    @staticmethod
    def causal(segments: Tensor) -> "MaskedWindows":
        """True where slot j of a window may be seen from slot i: the same segment, and not later."""
        slots = segments.shape[1]
        earlier = torch.ones(slots, slots, dtype=torch.bool, device=segments.device).tril()
        same = segments[:, :, None] == segments[:, None, :]
        return MaskedWindows((same & earlier)[:, None])


class LengthGroups(NamedTuple):
    """Rows sorted by the length of their text: `groups` are (number of items, tokens each). For CPU.

    Items of one length form a dense block, so neither padding nor a mask is needed.
    """

    groups: tuple[tuple[int, int], ...]


Layout = PackedRows | MaskedWindows | LengthGroups


def attend(qkv: Tensor, layout: Layout) -> Tensor:
    """Attention's output [R, H, d] of queries, keys and values [R, 3, H, d]."""
    if isinstance(layout, PackedRows):
        return packed_attention(qkv, *layout)
    if isinstance(layout, MaskedWindows):
        B, _, L, _ = layout.mask.shape
        query, key, value = qkv.unflatten(0, (B, L)).permute(2, 0, 3, 1, 4)  # [3, B, H, L, d]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.mask)
        return out.transpose(1, 2).flatten(0, 1)
    pieces = []
    for part, (items, length) in zip(qkv.split([n * t for n, t in layout.groups]), layout.groups, strict=True):
        query, key, value = part.unflatten(0, (items, length)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces) if pieces else qkv[:, 0]
